"""Logits of the transformers model of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from megatron_ext.conversion.core.family import Family, ShipsCode
from megatron_ext.conversion.core.float64 import in_float64
from megatron_ext.conversion.core.staged import of_last_positions, on_meta, staged
from megatron_ext.conversion.core.tensors import Tensors, check_keys
from megatron_ext.conversion.core.tolerance import KEPT
from megatron_ext.runs.tokenizer_files import read_json
from megatron_ext.utils.errors import UserError


def can_answer(family: Family) -> bool:
    """Return whether a family's model runs on the CPU.

    Those of transformers and our own do. Those of flash-linear-attention need a GPU.
    """
    return isinstance(family, ShipsCode) or hasattr(_transformers(), family.architecture)


def logits(folder: Path, family: Family, tensors: Tensors, tokens_bt: Tensor) -> Tensor:
    """Compute the model's logits in float64.

    Args:
        folder: folder with its config.json.
        family: family of its architecture, for which `can_answer` is true.
        tensors: its weights, by the family's keys.
        tokens_bt: int64 [b, t].

    Returns:
        float64 logits [b, k, v] of the last k tokens, at most `KEPT`.

    Raises:
        UserError: transformers is not installed, or the weights do not match the model.
    """
    with on_meta():
        model = _model(folder, family).eval()
    names = _keys(model)
    check_keys(set(names.values()), tensors.infos(), str(folder))
    kept = of_last_positions(model.get_output_embeddings(), KEPT, 1)  # type: ignore[operator]
    weights = staged(model, lambda name: tensors.read(names[name]))
    with torch.no_grad(), weights, in_float64(family.rotating() if isinstance(family, ShipsCode) else []), kept:
        answer: Tensor = model(input_ids=tokens_bt, use_cache=False).logits
    return answer


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError:
        hint = "install selectron[hf], or skip the check with --no-verify"
        raise UserError("--verify", "needs transformers, which is not installed", hint) from None
    return transformers


def _model(folder: Path, family: Family) -> torch.nn.Module:
    library = _transformers()
    if isinstance(family, ShipsCode):
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
