"""Logits of the transformers model of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from megatron_ext.conversion.core.family import Family, HasModelCode
from megatron_ext.conversion.core.float64 import in_float64
from megatron_ext.conversion.core.staged import last_positions_only, on_meta, read_on_use
from megatron_ext.conversion.core.tensors import Tensors, check_keys
from megatron_ext.conversion.core.tolerance import MAX_POSITIONS
from megatron_ext.runs.tokenizer_files import read_json
from megatron_ext.utils.errors import UserError


def runs_on_cpu(family: Family) -> bool:
    """Return whether a family's model runs on the CPU. Models of flash-linear-attention need a GPU."""
    return isinstance(family, HasModelCode) or hasattr(_transformers(), family.architecture)


def logits(folder: Path, family: Family, tensors: Tensors, tokens_bt: Tensor) -> Tensor:
    """Compute the model's logits in float64.

    Args:
        folder: folder with its config.json.
        family: family of its architecture, for which `runs_on_cpu` is true.
        tensors: its weights, by the family's keys.
        tokens_bt: int64 [b, t].

    Returns:
        float64 logits [b, k, v] of the last k tokens, at most `MAX_POSITIONS`.

    Raises:
        UserError: transformers is not installed, or the weights do not match the model.
    """
    with on_meta():
        model = _model(folder, family).eval()
    names = _keys(model)
    check_keys(set(names.values()), tensors.infos(), str(folder))
    last_positions = last_positions_only(model.get_output_embeddings(), MAX_POSITIONS, 1)  # type: ignore[operator]
    weights = read_on_use(model, lambda name: tensors.read(names[name]))
    rotary_modules = family.rotary_modules() if isinstance(family, HasModelCode) else []
    with torch.no_grad(), weights, in_float64(rotary_modules), last_positions:
        logits_btv: Tensor = model(input_ids=tokens_bt, use_cache=False).logits
    return logits_btv


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError:
        hint = "install selectron[hf], or skip the check with --no-verify"
        raise UserError("--verify", "needs transformers, which is not installed", hint) from None
    return transformers


def _model(folder: Path, family: Family) -> torch.nn.Module:
    library = _transformers()
    if isinstance(family, HasModelCode):
        return family.model(read_json(folder / "config.json"))
    # By its name: in AutoModelForCausalLM, flash-linear-attention replaces some models by its own.
    architecture = getattr(library, family.architecture)
    model: torch.nn.Module = architecture(architecture.config_class.from_pretrained(folder))
    return model.float()


def _keys(model: torch.nn.Module) -> dict[str, str]:
    """Return the checkpoint key of each parameter by name. A shared parameter has one key."""
    keys: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        keys.setdefault(id(parameter), name)
    return {name: keys[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
