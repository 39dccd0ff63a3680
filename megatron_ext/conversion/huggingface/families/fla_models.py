"""Base class of flash-linear-attention models with the Transformer++ block: RMSNorm, mixer, RMSNorm, SwiGLU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import Rule
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.huggingface.families.one_mixer import OneMixerFamily
from megatron_ext.conversion.huggingface.families.tensors import rename_rule, split_rows_rule

DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "vocab_size": 32000,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attn": None,
    "attnres_block_size": None,
    "fuse_norm": True,
}
"""Defaults that the configurations of these models share in flash-linear-attention 0.6."""


class FlaTransformer(OneMixerFamily):
    """Model family of flash-linear-attention with the Transformer++ block."""

    block: ClassVar[str] = "transformer"
    embedding: ClassVar[str] = "model.embeddings"
    final_norm: ClassVar[str] = "model.norm"
    layer: ClassVar[str] = "model.layers"
    mixer_name: ClassVar[str] = "attn"

    @abstractmethod
    def mixer_fields(self, model: ModelConfig, mixer: Any) -> dict[str, Any]:
        """Return the fields of config.json that describe the mixer."""

    @abstractmethod
    def read_mixer(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of `ModelConfig` and of the mixer's configuration that describe the mixer.

        This is the inverse of `mixer_fields`.
        """

    def config_fields(self, model: ModelConfig, mixer: Any) -> dict[str, Any]:
        """Implement `OneMixerFamily.config_fields`."""
        return {
            "intermediate_size": model.ffn_hidden_size,
            "hidden_act": "swish",
            "norm_eps": model.norm_epsilon,
            "max_position_embeddings": model.max_position_embeddings,
            **self.mixer_fields(model, mixer),
        }

    def read(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `OneMixerFamily.read`."""
        fields.require("attn", None)
        fields.require("attnres_block_size", None)
        fields.require("hidden_act", "swish")
        model, mixer = self.read_mixer(fields)
        return {
            "ffn_hidden_size": read_ffn_hidden_size(fields, thirds=2, multiple=256),
            "norm_epsilon": fields.positive_number("norm_eps"),
            **model,
        }, mixer

    def layer_rules(self, model: ModelConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.layer_rules`."""
        assert model.ffn_hidden_size is not None
        yield from self.norm_rules(model, "input_layernorm", "attn_norm")
        yield from self.norm_rules(model, "pre_mlp_layernorm", "mlp_norm")
        # Megatron-LM stacks SwiGLU's input matrices as [gate; value].
        halves = {f"mlp.{name}_proj.weight": model.ffn_hidden_size for name in ("gate", "up")}
        yield split_rows_rule("mlp.linear_fc1.weight", halves, head_groups=1)
        yield rename_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight")


def read_ffn_hidden_size(fields: Fields, *, thirds: int, multiple: int) -> int:
    """Return the hidden width of the feed-forward layer, with flash-linear-attention's default if none is given.

    Args:
        fields: the fields `intermediate_size`, `hidden_ratio` and `hidden_size` are read.
        thirds: factor on `hidden_ratio`, in thirds: 2 for a feed-forward of three matrices, 3 for one of two.
        multiple: the default is rounded up to a multiple of this.
    """
    if fields["intermediate_size"] is not None:
        return fields.positive_int("intermediate_size")
    ratio = 4.0 if fields["hidden_ratio"] is None else fields.positive_number("hidden_ratio")
    return -(-int(fields.positive_int("hidden_size") * ratio * thirds / 3) // multiple) * multiple


def read_expanded_heads(fields: Fields) -> tuple[dict[str, Any], int]:
    """Read heads whose widths are given by `expand_k` and `expand_v`.

    These fields are the total key and value widths divided by the hidden size.

    Returns:
        Fields of `ModelConfig`, and our `expand_v`: the width of a value divided by the width of a key.
    """
    hidden, heads = fields.positive_int("hidden_size"), fields.positive_int("num_heads")
    key_dim, value_dim = (fields.positive_number(name) * hidden for name in ("expand_k", "expand_v"))
    head_dim = fields.divide("expand_k", key_dim, "num_heads", heads)
    return (
        {"num_attention_heads": heads, "head_dim": head_dim},
        fields.divide("expand_v", value_dim, "the width of all keys", heads * head_dim),
    )


def expanded_head_fields(model: ModelConfig, expand_v: int) -> dict[str, Any]:
    """Return `num_heads`, `expand_k` and `expand_v` of config.json; the inverse of `read_expanded_heads`."""
    assert model.head_dim is not None
    width = model.num_attention_heads * model.head_dim
    return {
        "num_heads": model.num_attention_heads,
        "expand_k": width / model.hidden_size,
        "expand_v": width * expand_v / model.hidden_size,
    }
