"""What transformers' model of a folder answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.checkpoint.conversion.staged import on_meta, staged
from megatron_ext.checkpoint.conversion.tensors import Tensors, check_keys
from megatron_ext.errors import UserError


def logits(folder: Path, tensors: Tensors, tokens_bt: Tensor) -> Tensor:
    """What AutoModelForCausalLM answers, computed in fp32.

    Args:
        folder: with its config.json.
        tensors: its weights, by its own keys.
        tokens_bt: int64 [b, t].

    Returns:
        fp32 logits [b, t, v].

    Raises:
        UserError: transformers is not installed, or its model has other weights.
    """
    model = _model(folder)
    names = _keys(model)
    check_keys(set(names.values()), tensors.infos(), str(folder))
    read: Callable[[str], Tensor] = lambda name: tensors.read(names[name]).float()  # noqa: E731
    with torch.no_grad(), staged(model, read):
        answer: Tensor = model(input_ids=tokens_bt, use_cache=False).logits
    return answer.float()


def _model(folder: Path) -> torch.nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        mend = "install selectron[hf], or leave the check out with --no-verify"
        raise UserError("--verify", "needs transformers, which is not installed", mend) from None
    config = AutoConfig.from_pretrained(folder)
    with on_meta():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def _keys(model: torch.nn.Module) -> dict[str, str]:
    """The key of every parameter in a checkpoint; one that is shared has one."""
    keys: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        keys.setdefault(id(parameter), name)
    return {name: keys[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
