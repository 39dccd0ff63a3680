"""Megatron's transformer layer with optional recomputation of the feed-forward."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class BlockLayer(TransformerLayer):
    """norm, mixer, residual, norm, feed-forward, residual.

    With `recompute_feed_forward` in the configuration, no activation after the mixer's residual is saved for the
    backward pass. Megatron's `recompute_modules=["mlp"]` also saves the norm's output, and its recomputation of norms
    requires Transformer Engine.
    """

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        forward = super()._forward_mlp
        if not (self.config.recompute_feed_forward and self.training and torch.is_grad_enabled()):
            output: Tensor = forward(hidden_states, *args, **kwargs)
            return output

        def forward_mlp(x: Tensor) -> Tensor:
            output: Tensor = forward(x, *args, **kwargs)
            return output

        if self.config.fp8:  # Megatron's `checkpoint` does not recompute in FP8
            from megatron.core.extensions.transformer_engine import te_checkpoint

            rng, tp_group = get_cuda_rng_tracker, self.pg_collection.tp
            recomputed: Tensor = te_checkpoint(forward_mlp, False, rng, tp_group, hidden_states)
        else:
            recomputed = checkpoint(forward_mlp, False, hidden_states)
        return recomputed
