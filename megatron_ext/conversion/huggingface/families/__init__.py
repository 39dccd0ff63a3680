"""Model families of other libraries by architecture name, and the choice of one for a model."""

from __future__ import annotations

from megatron_ext.conversion.core.family import Family, SavedModel
from megatron_ext.conversion.huggingface.families.deltanet import DeltaNetFamily
from megatron_ext.conversion.huggingface.families.gated_deltanet import GatedDeltaNetFamily
from megatron_ext.conversion.huggingface.families.gla import GLAFamily
from megatron_ext.conversion.huggingface.families.llama import Llama
from megatron_ext.conversion.huggingface.families.mamba import MambaFamily
from megatron_ext.conversion.huggingface.families.mamba2 import Mamba2Family
from megatron_ext.conversion.huggingface.families.nsa import NSAFamily
from megatron_ext.conversion.huggingface.families.rwkv7 import RWKV7Family
from megatron_ext.conversion.huggingface.families.selectron import Selectron
from megatron_ext.utils.errors import UserError

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Llama(),
    "DeltaNetForCausalLM": DeltaNetFamily(),
    "GLAForCausalLM": GLAFamily(),
    "GatedDeltaNetForCausalLM": GatedDeltaNetFamily(),
    "Mamba2ForCausalLM": Mamba2Family(),
    "MambaForCausalLM": MambaFamily(),
    "NSAForCausalLM": NSAFamily(),
    "RWKV7ForCausalLM": RWKV7Family(),
    "SelectronForCausalLM": Selectron(),  # last, because it supports every built-in mixer
}


def find_family(architecture: str, where: str) -> Family:
    """Return the family with this name in the `architectures` field of config.json.

    Args:
        architecture: name of the architecture.
        where: file or option to name in the error message.

    Raises:
        UserError: the architecture is unknown.
    """
    if architecture not in FAMILIES:
        raise UserError(where, f"architecture {architecture} is not supported", f"give one of {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def choose_family(saved: SavedModel, architecture: str | None = None) -> Family:
    """Return the family that a model is exported as.

    Args:
        saved: the model.
        architecture: name of the architecture; None: the first one that supports the model.

    Raises:
        UserError: this architecture, or every architecture, does not support the model.
    """
    if architecture is not None:
        family = find_family(architecture, "--architecture")
        reason = family.unsupported_reason(saved)
        if reason is not None:
            raise UserError("--architecture", f"{architecture} cannot represent the model: {reason}", "remove it")
        return family
    supported = next((family for family in FAMILIES.values() if family.unsupported_reason(saved) is None), None)
    if supported is None:
        # Each of the other families supports only one mixer, so only this family's reason is useful.
        ours = FAMILIES["SelectronForCausalLM"]
        reason = f"not even {ours.architecture}: {ours.unsupported_reason(saved)}"
        hint = "give --to megatron, or add the mixer to conversion/huggingface (docs/extending/mixer.md)"
        raise UserError("model.pattern", f"{saved.model.pattern!r} fits no architecture, {reason}", hint)
    return supported
