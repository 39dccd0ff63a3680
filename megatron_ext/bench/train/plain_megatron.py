"""Plain megatron-core GPT as a baseline for `selectron bench train`, with Megatron's own layers, attention and loss.

Sizes, batches, pipeline schedule, Megatron's optimizer and the recomputation setting are those of our model. With
Transformer Engine the baseline has its fused attention and norms, and Megatron's fused RoPE, SwiGLU and cross entropy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import RunConfig
from megatron_ext.mixers.core.key_value import keys_in_window
from megatron_ext.mixers.core.settings import AttentionConfig
from megatron_ext.model.build import transformer_config
from megatron_ext.model.shape import ModelShape
from megatron_ext.optim.megatron import MegatronRunOptimizer
from megatron_ext.platform.device import Platform
from megatron_ext.training.trainer import Trainer
from megatron_ext.utils.errors import UserError


class PlainGPT(GPTModel):
    """Megatron's GPT and cross entropy over the same vocabulary as ours, with logits of padding rows masked.

    Megatron itself treats the padding rows as tokens.

    Args:
        num_tokens: vocabulary size, at most Megatron's `vocab_size`, which includes padding rows.
    """

    def __init__(self, *args: Any, num_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_tokens = num_tokens

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return losses [b, t] of labels [b, t], given logits [t, b, v / tp], which are modified."""
        first = self.pg_collection.tp.rank() * logits.shape[-1]
        logits[..., max(self._num_tokens - first, 0) :] = -torch.inf
        losses_bt: Tensor = super().compute_language_model_loss(labels, logits)
        return losses_bt


def check_plain(config: RunConfig) -> None:
    """Check that plain megatron-core supports such a model.

    Raises:
        UserError: it does not.
    """
    settings = AttentionConfig(**config.mixers.get("attention", {}))
    if set(parse_pattern(config.model.pattern)) != {"attention"} or settings != AttentionConfig():
        hint = "set it to attention*N, with default mixers.attention"
        raise UserError("model.pattern", f"{config.model.pattern!r} is not supported by plain megatron-core", hint)
    if config.model.block != "transformer":
        raise UserError(
            "model.block", f"{config.model.block!r} is not supported by plain megatron-core", "set it to transformer"
        )
    parallel = config.parallel
    if parallel.context > 1 or parallel.pipeline > 1:
        problem = f"{parallel.context} and parallel.pipeline {parallel.pipeline}, but plain megatron-core needs 1"
        raise UserError("parallel.context", problem, "set both to 1")
    if config.optimizer.sharding not in ("none", "megatron"):
        problem = f"{config.optimizer.sharding} is not supported by plain megatron-core"
        raise UserError("optimizer.sharding", problem, "set it to megatron or none")


def build_plain(config: RunConfig, shape: ModelShape, groups: ProcessGroupCollection, platform: Platform) -> Trainer:
    """Build model, optimizer and schedule of this rank, with Megatron's initialization; see `build_trainer`."""
    megatron = _megatron_config(shape, platform)
    uses_engine = shape.backend == "transformer_engine"
    norm = "RMSNorm" if shape.model.normalization == "rms_norm" else "LayerNorm"
    spec = get_gpt_layer_with_transformer_engine_spec() if uses_engine else get_gpt_layer_local_spec(normalization=norm)
    torch.manual_seed(config.training.seed)
    with platform.optimizer_context():
        model = PlainGPT(
            config=megatron,
            transformer_layer_spec=spec,
            vocab_size=shape.padded_vocab_size,
            num_tokens=shape.vocab_size,
            max_sequence_length=config.data.seq_length,
            share_embeddings_and_output_weights=shape.model.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=int(shape.model.rotary_base),
            pg_collection=groups,
        )
    model.model_type = ModelType.encoder_or_decoder
    chunk = Float16Module(megatron, model.to(platform.device)) if megatron.bf16 else model
    training, size = config.training, config.training.micro_batch_size
    optimizer = MegatronRunOptimizer([chunk], config.optimizer, training.steps, training.precision, groups, platform)
    return Trainer(optimizer, groups, platform, config.data.seq_length, size)


def _megatron_config(shape: ModelShape, platform: Platform) -> TransformerConfig:
    """Return Megatron's own configuration, with its GPU fusions and selective recomputation of the feed-forward."""
    ours = transformer_config(replace(shape, recompute="full" if shape.recompute == "full" else "none"), platform)
    changes: dict[str, Any] = dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"))
    fused = ("apply_rope_fusion", "cross_entropy_loss_fusion", "bias_dropout_fusion")
    changes |= dict.fromkeys(fused, platform.is_cuda)
    if shape.recompute == "mlp":
        changes |= {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    return replace(ours, **changes)


def plain_flops_per_token(shape: ModelShape, trainer: Trainer, seq_length: int) -> float:
    """Return the model FLOPs per token of forward and backward pass, as `training_flops_per_token` counts ours.

    These are six per weight of a matrix without the embedding's lookup, plus the causal pairs of attention.
    """
    model = shape.model
    assert model.head_dim is not None, "the configuration is derived"
    rank_weights = sum(p.numel() for chunk in trainer.optimizer.chunks for p in chunk.parameters() if p.dim() == 2)
    embedding_weights = 0 if model.tie_embeddings else shape.padded_vocab_size * model.hidden_size
    attention_flops = 4 * model.num_attention_heads * model.head_dim * keys_in_window(None, seq_length)
    return 6 * (rank_weights * shape.parallel.tensor - embedding_weights) + 3 * len(shape.mixers) * attention_flops
