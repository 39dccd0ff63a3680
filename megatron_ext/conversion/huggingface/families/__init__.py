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


def family_of_architecture(architecture: str, where: str) -> Family:
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


def family_for(saved: SavedModel, architecture: str | None = None) -> Family:
    """Return the family that a model is exported as.

    Args:
        saved: the model.
        architecture: name of the architecture; None: the first one that supports the model.

    Raises:
        UserError: this architecture, or every architecture, does not support the model.
    """
    if architecture is not None:
        family = family_of_architecture(architecture, "--architecture")
        reason = family.why_not(saved)
        if reason is not None:
            raise UserError("--architecture", f"{architecture} cannot represent the model: {reason}", "leave it out")
        return family
    fitting = next((family for family in FAMILIES.values() if family.why_not(saved) is None), None)
    if fitting is None:
        # The other families are of one mixer each, so their reasons help no one.
        ours = FAMILIES["SelectronForCausalLM"]
        problem = f"{saved.model.pattern!r} fits no architecture, not even {ours.architecture}: {ours.why_not(saved)}"
        hint = "give --to megatron, or add the mixer to conversion/huggingface (docs/extending/mixer.md)"
        raise UserError("model.pattern", problem, hint)
    return fitting
