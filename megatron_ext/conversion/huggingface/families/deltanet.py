"""Conversion between DeltaNet and flash-linear-attention's `DeltaNetForCausalLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import Rule
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.huggingface.families.fla_models import (
    DEFAULTS,
    FlaTransformer,
    expanded_head_fields,
    read_expanded_heads,
)
from megatron_ext.conversion.huggingface.families.tensors import rename_rule, split_rows_rule, transform_ours
from megatron_ext.mixers.core.settings import DeltaNetConfig


class DeltaNetFamily(FlaTransformer):
    """Family of `DeltaNetForCausalLM`. Its layer always has an output norm, regardless of `use_output_norm`."""

    architecture: str = "DeltaNetForCausalLM"
    model_type: ClassVar[str] = "delta_net"
    mixer: ClassVar[str] = "deltanet"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "use_gate": False,
        "use_short_conv": True,
        "conv_size": 4,
        "use_beta": True,
        "allow_neg_eigval": False,
        "qk_norm": "l2",
        "qk_activation": "silu",
    }

    head_scalars: ClassVar[tuple[str, ...]] = ("b_proj.weight",)
    """Names of projections with one row per head."""

    def unsupported_mixer_reason(self, model: ModelConfig, mixer: DeltaNetConfig) -> str | None:
        """Implement `OneMixerFamily.unsupported_mixer_reason`."""
        return None

    def mixer_fields(self, model: ModelConfig, mixer: DeltaNetConfig) -> dict[str, Any]:
        """Implement `FlaTransformer.mixer_fields`."""
        other_fields = {"use_gate": mixer.output_gate, "conv_size": mixer.conv_kernel_size}
        return self.head_fields(model, mixer.expand_v) | other_fields

    def head_fields(self, model: ModelConfig, expand_v: int) -> dict[str, Any]:
        """Return the fields of config.json for the number and the widths of heads."""
        return expanded_head_fields(model, expand_v)

    def read_mixer(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `FlaTransformer.read_mixer`."""
        model, expand_v = self.read_heads(fields)
        fields.require("use_short_conv", True)
        fields.require("allow_neg_eigval", False)
        other_fields = {"output_gate": fields.flag("use_gate"), "conv_kernel_size": fields.positive_int("conv_size")}
        return model, {"expand_v": expand_v, **other_fields}

    def read_heads(self, fields: Fields) -> tuple[dict[str, Any], int]:
        """Return the head fields of `ModelConfig`, and our `expand_v`."""
        fields.require("use_beta", True)
        fields.require("qk_norm", "l2")
        fields.require("qk_activation", "silu")
        return read_expanded_heads(fields)

    def mixer_rules(self, model: ModelConfig, mixer: DeltaNetConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules`."""
        assert model.head_dim is not None
        heads, d, e = model.num_attention_heads, model.head_dim, model.head_dim * mixer.expand_v
        qkv = {"q": d, "k": d, "v": e}
        widths = {f"{name}_proj.weight": width for name, width in (qkv | {"g": e * mixer.output_gate}).items()}
        yield split_rows_rule("in_proj.weight", widths | dict.fromkeys(self.head_scalars, 1), heads)
        taps = split_rows_rule("conv_weight", {f"{name}_conv1d.weight": width for name, width in qkv.items()}, heads)
        # Ours is [head groups, width, kernel], theirs [channels, 1, kernel] as in torch's grouped convolution.
        yield transform_ours(taps, lambda x: x.flatten(0, 1)[:, None], lambda x: x[:, 0].unflatten(0, (heads, -1)))
        yield rename_rule("norm_weight", "o_norm.weight")
        yield rename_rule("out_proj.weight", "o_proj.weight")
