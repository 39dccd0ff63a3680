"""Conversion between Gated DeltaNet and flash-linear-attention's `GatedDeltaNetForCausalLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import Rule
from megatron_ext.conversion.huggingface.families.deltanet import DeltaNetFamily
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.huggingface.families.fla_models import DEFAULTS
from megatron_ext.conversion.huggingface.families.tensors import rename_rule
from megatron_ext.mixers.core.settings import DeltaNetConfig


class GatedDeltaNetFamily(DeltaNetFamily):
    """Family of `GatedDeltaNetForCausalLM`: DeltaNet with a decay. The `head_dim` field gives the width of a head."""

    architecture: str = "GatedDeltaNetForCausalLM"
    model_type: ClassVar[str] = "gated_deltanet"
    mixer: ClassVar[str] = "gated_deltanet"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "num_hidden_layers": 21,
        "num_heads": 6,
        "num_v_heads": None,
        "head_dim": 256,
        "expand_v": 2.0,
        "use_gate": True,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "output_gate_activation": "swish",
    }

    head_scalars: ClassVar[tuple[str, ...]] = ("b_proj.weight", "a_proj.weight")

    def head_fields(self, model: ModelConfig, expand_v: int) -> dict[str, Any]:
        """Implement `DeltaNetFamily.head_fields`."""
        return {"num_heads": model.num_attention_heads, "head_dim": model.head_dim, "expand_v": float(expand_v)}

    def read_heads(self, fields: Fields) -> tuple[dict[str, Any], int]:
        """Implement `DeltaNetFamily.read_heads`."""
        heads, head_dim = fields.positive_int("num_heads"), fields.positive_int("head_dim")
        fields.require("num_v_heads", None, heads)
        fields.require("output_gate_activation", "swish", "silu")
        expand_v = fields.divide("expand_v", fields.positive_number("expand_v") * head_dim, "head_dim", head_dim)
        return {"num_attention_heads": heads, "head_dim": head_dim}, expand_v

    def mixer_rules(self, model: ModelConfig, mixer: DeltaNetConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules`."""
        yield from super().mixer_rules(model, mixer)
        yield rename_rule("log_decay", "A_log")
        yield rename_rule("step_bias", "dt_bias")
