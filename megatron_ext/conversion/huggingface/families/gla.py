"""Conversion between GLA and flash-linear-attention's `GLAForCausalLM`."""

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
from megatron_ext.conversion.huggingface.families.tensors import flatten_rule, rename_rule, split_rows_rule
from megatron_ext.mixers.core.settings import GLAConfig

FIXED = GLAConfig(decay_rank=16, decay_temperature=16.0)
"""Settings that the layer of flash-linear-attention fixes and config.json cannot change."""


class GLAFamily(FlaTransformer):
    """Family of `GLAForCausalLM`.

    With an output gate, the name of the norm's parameter depends on `fuse_norm`. Only the fused norm is supported.
    """

    architecture: str = "GLAForCausalLM"
    model_type: ClassVar[str] = "gla"
    mixer: ClassVar[str] = "gla"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "use_output_gate": True,
        "feature_map": None,
        "use_short_conv": False,
        "clamp_min": None,
        "elementwise_affine": True,
    }

    def unsupported_mixer_reason(self, model: ModelConfig, mixer: GLAConfig) -> str | None:
        """Implement `OneMixerFamily.unsupported_mixer_reason`."""
        for name in ("decay_rank", "decay_temperature"):
            if getattr(mixer, name) != getattr(FIXED, name):
                fixed = getattr(FIXED, name)
                return f"mixers.gla.{name} is {getattr(mixer, name):g}, but the architecture fixes it at {fixed:g}"
        return None

    def mixer_fields(self, model: ModelConfig, mixer: GLAConfig) -> dict[str, Any]:
        """Implement `FlaTransformer.mixer_fields`."""
        return expanded_head_fields(model, mixer.expand_v) | {"use_output_gate": mixer.output_gate}

    def read_mixer(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `FlaTransformer.read_mixer`."""
        model, expand_v = read_expanded_heads(fields)
        fields.require("num_kv_heads", None, model["num_attention_heads"])
        fields.require("feature_map", None)
        fields.require("use_short_conv", False)
        fields.require("clamp_min", None)
        fields.require("elementwise_affine", True)
        gate = fields.flag("use_output_gate")
        if gate:
            fields.require("fuse_norm", True)
        ranks = {"decay_rank": FIXED.decay_rank, "decay_temperature": FIXED.decay_temperature}
        return model, {"expand_v": expand_v, "output_gate": gate, **ranks}

    def mixer_rules(self, model: ModelConfig, mixer: GLAConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules`."""
        assert model.head_dim is not None
        heads, d, e = model.num_attention_heads, model.head_dim, model.head_dim * mixer.expand_v
        widths = {"q": d, "k": d, "v": e, "g": e if mixer.output_gate else 0}
        yield split_rows_rule("in_proj.weight", {f"{name}_proj.weight": width for name, width in widths.items()}, heads)
        yield rename_rule("decay_down", "gk_proj.0.weight")
        yield flatten_rule("decay_up", "gk_proj.1.weight", heads)
        yield flatten_rule("decay_bias", "gk_proj.1.bias", heads)
        yield rename_rule("norm_weight", "g_norm_swish_gate.weight" if mixer.output_gate else "g_norm.weight")
        yield rename_rule("out_proj.weight", "o_proj.weight")
