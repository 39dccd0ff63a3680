"""Megatron's transformer layer, whose feed-forward may be computed again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class BlockLayer(TransformerLayer):
    """norm, mixer, residual, norm, feed-forward, residual.

    With `recompute_feed_forward` in the model's configuration, nothing behind the mixer's residual is kept for the
    backward pass. Megatron's own `recompute_modules=["mlp"]` keeps the norm's output, too, and its recomputation of
    norms needs Transformer Engine.
    """

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        forward = super()._forward_mlp
        if not (self.config.recompute_feed_forward and self.training and torch.is_grad_enabled()):
            output: Tensor = forward(hidden_states, *args, **kwargs)
            return output

        def of_hidden_states(x: Tensor) -> Tensor:
            output: Tensor = forward(x, *args, **kwargs)
            return output

        if self.config.fp8:  # to be computed again as it was, in 8 bits, which Megatron's does not do
            from megatron.core.extensions.transformer_engine import te_checkpoint

            rng, tp_group = get_cuda_rng_tracker, self.pg_collection.tp
            recomputed: Tensor = te_checkpoint(of_hidden_states, False, rng, tp_group, hidden_states)
        else:
            recomputed = checkpoint(of_hidden_states, False, hidden_states)
        return recomputed
