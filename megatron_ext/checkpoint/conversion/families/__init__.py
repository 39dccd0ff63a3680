"""The model families of other libraries, by the name of their architecture."""

from __future__ import annotations

from megatron_ext.checkpoint.conversion.families.deltanet import DeltaNetFamily
from megatron_ext.checkpoint.conversion.families.gated_deltanet import GatedDeltaNetFamily
from megatron_ext.checkpoint.conversion.families.gla import GLAFamily
from megatron_ext.checkpoint.conversion.families.mamba import MambaFamily
from megatron_ext.checkpoint.conversion.families.mamba2 import Mamba2Family
from megatron_ext.checkpoint.conversion.families.nsa import NSAFamily
from megatron_ext.checkpoint.conversion.families.rwkv7 import RWKV7Family
from megatron_ext.checkpoint.conversion.family import Family

FAMILIES: dict[str, Family] = {
    "DeltaNetForCausalLM": DeltaNetFamily(),
    "GLAForCausalLM": GLAFamily(),
    "GatedDeltaNetForCausalLM": GatedDeltaNetFamily(),
    "Mamba2ForCausalLM": Mamba2Family(),
    "MambaForCausalLM": MambaFamily(),
    "NSAForCausalLM": NSAFamily(),
    "RWKV7ForCausalLM": RWKV7Family(),
}
