"""Conversion between Native Sparse Attention and flash-linear-attention's `NSAForCausalLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import Rule
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.huggingface.families.fla_models import DEFAULTS, FlaTransformer
from megatron_ext.conversion.huggingface.families.tensors import rename_rule, split_rows_rule
from megatron_ext.mixers.core.settings import NUM_BRANCHES, NSAConfig

MIN_GROUP_SIZE = 16
"""Minimum number of query heads per key head in flash-linear-attention's kernel, which also requires a power of two."""


class NSAFamily(FlaTransformer):
    """Family of `NSAForCausalLM`: grouped queries, three branches and gates as in our mixer."""

    architecture: str = "NSAForCausalLM"
    model_type: ClassVar[str] = "nsa"
    mixer: ClassVar[str] = "nsa"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "num_heads": 64,
        "num_kv_heads": 4,
        "head_dim": 32,
        "qkv_bias": False,
        "block_size": 64,
        "block_counts": 16,
        "window_size": 512,
        "rope_theta": 10000.0,
    }

    def unsupported_mixer_reason(self, model: ModelConfig, mixer: NSAConfig) -> str | None:
        """Implement `OneMixerFamily.unsupported_mixer_reason`."""
        assert model.num_query_groups is not None
        if mixer.position_encoding != "rope":
            encoding = mixer.position_encoding
            return f"mixers.nsa.position_encoding is {encoding}, but the architecture uses rotary embeddings"
        group_size = model.num_attention_heads // model.num_query_groups
        if group_size < MIN_GROUP_SIZE or group_size & (group_size - 1):
            return (
                f"{group_size} query heads share a key (model.num_attention_heads {model.num_attention_heads} / "
                f"num_query_groups {model.num_query_groups}), but the architecture requires a power of two that is at "
                f"least {MIN_GROUP_SIZE}"
            )
        return None

    def mixer_fields(self, model: ModelConfig, mixer: NSAConfig) -> dict[str, Any]:
        """Implement `FlaTransformer.mixer_fields`."""
        return {
            "num_heads": model.num_attention_heads,
            "num_kv_heads": model.num_query_groups,
            "head_dim": model.head_dim,
            "block_size": mixer.block_size,
            "block_counts": mixer.num_selected,
            "window_size": mixer.window,
            "rope_theta": model.rotary_base,
        }

    def read_mixer(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `FlaTransformer.read_mixer`."""
        fields.require("qkv_bias", False)
        names = {"block_size": "block_size", "num_selected": "block_counts", "window": "window_size"}
        return {
            **fields.heads("num_heads", "num_kv_heads", "head_dim"),
            "rotary_base": fields.positive_number("rope_theta"),
        }, {ours: fields.positive_int(theirs) for ours, theirs in names.items()}

    def mixer_rules(self, model: ModelConfig, mixer: NSAConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules`."""
        assert model.head_dim is not None
        assert model.num_query_groups is not None
        groups, d = model.num_query_groups, model.head_dim
        queries = model.num_attention_heads // groups
        widths = {"q": queries * d, "k": d, "v": d, "g": NUM_BRANCHES * queries}
        yield split_rows_rule(
            "in_proj.weight", {f"{name}_proj.weight": width for name, width in widths.items()}, groups
        )
        yield rename_rule("out_proj.weight", "o_proj.weight")
