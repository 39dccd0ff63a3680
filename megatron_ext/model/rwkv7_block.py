"""RWKV-7's block around any mixer: token shift before the mixer and before the feed-forward.

Peng et al. 2025 (arXiv 2503.14456). Around other mixers than RWKV's own this is a reconstruction: the study's public
text (arXiv 2505.18522) states that its long runs used Top-1 Chunk in RWKV-7's block, but not how.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_ext.mixers.core.decode_cache import HistoryModule
from megatron_ext.mixers.core.token_shift import layers_left, mixtures, ramp
from megatron_ext.model.block_layer import BlockLayer
from megatron_ext.parallel.parameters import Initializer, new_parameter


class ShiftedNorm(HistoryModule):
    """Norm followed by the token shift: y_t + (y_{t-1} - y_t) * mu, with one mu per channel.

    Args:
        config: Megatron's configuration of the model.
        norm: norm whose output is shifted.
        initializer: initializer of mu.
        pg_collection: process groups; `tp`, `cp` and `tp_cp` are used.
    """

    def __init__(
        self,
        config: TransformerConfig,
        norm: torch.nn.Module,
        initializer: Initializer,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        # Ranks in the order of their tokens: sequence parallelism splits a context-parallel rank's shard.
        super().__init__(config, pg_collection.tp_cp if config.sequence_parallel else pg_collection.cp)
        self.norm = norm
        self.mu = new_parameter((config.hidden_size,), initializer, dtype=config.params_dtype)
        # Its gradient covers this rank's tokens only, so Megatron must sum it over sequence-parallel ranks.
        self.mu.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.tp_group = pg_collection.tp

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [t, b, hidden], sharded by context and sequence parallelism, to the same shape."""
        normed = self.norm(hidden_states)
        (shifted,) = mixtures(normed, self.history.previous_rows("hidden_states", normed, 1), self.mu[None])
        return shifted


class RWKV7Layer(BlockLayer):
    """norm, token shift, mixer, residual, norm, token shift, feed-forward, residual.

    The feed-forward is RWKV-7's channel mix if Megatron's MLP has a squared ReLU and no gate. The first token shift is
    left out if the mixer shifts tokens itself.

    Args:
        config: Megatron's configuration of the model.
        submodules: as in `TransformerLayer`.
        layer_number: number in this model chunk, from 1.
        pg_collection: process groups.
        kwargs: further arguments of `TransformerLayer`.
    """

    input_layernorm: torch.nn.Module
    pre_mlp_layernorm: torch.nn.Module

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, **kwargs)
        remaining_fraction = layers_left(self.layer_number, config.num_layers)
        if not self.self_attention.traits.shifts_tokens:
            # The initial value of RWKV-7's keys and values.
            self.input_layernorm = ShiftedNorm(
                config, self.input_layernorm, ramp(0.7 * remaining_fraction), pg_collection
            )
        self.pre_mlp_layernorm = ShiftedNorm(config, self.pre_mlp_layernorm, ramp(remaining_fraction**4), pg_collection)
