"""Derived fields: filled in once, so that a saved configuration is complete."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.config.schema import ModelConfig, RunConfig
from megatron_ext.utils.errors import UserError

FFN_MULTIPLE = 64


def derive(config: RunConfig) -> RunConfig:
    """Fill in the fields that are None.

    Args:
        config: a configuration. A complete one is returned unchanged.

    Returns:
        The configuration with `num_query_groups`, `head_dim`, `ffn_hidden_size` (except with block `mixer`) and
            `max_position_embeddings`.

    Raises:
        UserError: hidden_size is not a multiple of the number of heads and no head_dim is given.
    """
    model = config.model
    whole = replace(
        model,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        head_dim=model.head_dim or _head_dim(model),
        ffn_hidden_size=model.ffn_hidden_size or _ffn_hidden_size(model),
        max_position_embeddings=model.max_position_embeddings or config.data.seq_length,
    )
    return replace(config, model=whole)


def _head_dim(model: ModelConfig) -> int:
    if model.hidden_size % model.num_attention_heads:
        raise UserError(
            "model.num_attention_heads",
            f"model.hidden_size {model.hidden_size} is not divisible by {model.num_attention_heads} heads",
            "change one of them, or set model.head_dim",
        )
    return model.hidden_size // model.num_attention_heads


def _ffn_hidden_size(model: ModelConfig) -> int | None:
    if model.block == "mixer":
        return None
    if model.block == "rwkv7":
        return 4 * model.hidden_size
    # With 8/3, three SwiGLU matrices have as many parameters as two matrices of width 4 * hidden_size.
    return -(-8 * model.hidden_size // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
