"""The model families of other libraries, by the name of their architecture, and which of them can hold a model."""

from __future__ import annotations

from megatron_ext.checkpoint.conversion.families.deltanet import DeltaNetFamily
from megatron_ext.checkpoint.conversion.families.gated_deltanet import GatedDeltaNetFamily
from megatron_ext.checkpoint.conversion.families.gla import GLAFamily
from megatron_ext.checkpoint.conversion.families.llama import Llama
from megatron_ext.checkpoint.conversion.families.mamba import MambaFamily
from megatron_ext.checkpoint.conversion.families.mamba2 import Mamba2Family
from megatron_ext.checkpoint.conversion.families.nsa import NSAFamily
from megatron_ext.checkpoint.conversion.families.rwkv7 import RWKV7Family
from megatron_ext.checkpoint.conversion.families.selectron import Selectron
from megatron_ext.checkpoint.conversion.family import Family, SavedModel
from megatron_ext.errors import UserError

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Llama(),
    "DeltaNetForCausalLM": DeltaNetFamily(),
    "GLAForCausalLM": GLAFamily(),
    "GatedDeltaNetForCausalLM": GatedDeltaNetFamily(),
    "Mamba2ForCausalLM": Mamba2Family(),
    "MambaForCausalLM": MambaFamily(),
    "NSAForCausalLM": NSAFamily(),
    "RWKV7ForCausalLM": RWKV7Family(),
    "SelectronForCausalLM": Selectron(),  # the last, as it can hold every model
}


def family_of_architecture(architecture: str, where: str) -> Family:
    """The family of an `architectures` entry.

    Raises:
        UserError: there is none.
    """
    if architecture not in FAMILIES:
        raise UserError(where, f"architecture {architecture} is not known here", f"give one of {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def family_for(saved: SavedModel, architecture: str | None = None) -> Family:
    """The family that a model is written as.

    Args:
        saved: the model.
        architecture: of the family; None: the first one that can hold the model.

    Raises:
        UserError: it cannot hold the model, or none can.
    """
    if architecture is not None:
        family = family_of_architecture(architecture, "--architecture")
        reason = family.why_not(saved)
        if reason is not None:
            raise UserError("--architecture", f"{architecture} cannot hold the model: {reason}", "leave it out")
        return family
    reasons = {family.architecture: family.why_not(saved) for family in FAMILIES.values()}
    fitting = [name for name, reason in reasons.items() if reason is None]
    if not fitting:
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        problem = f"{saved.model.pattern!r} fits no architecture ({said})"
        raise UserError("model.pattern", problem, "give --to megatron")
    return FAMILIES[fitting[0]]
