"""The one interface behind which every optimizer stands: Megatron's, and DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class RunOptimizer(Protocol):
    """Owns the wrapped model chunks, their gradients, the optimizer and the learning-rate schedule."""

    @property
    def chunks(self) -> Sequence[torch.nn.Module]:
        """Model chunks of this rank, wrapped: gradients accumulate in fp32, reduced over data-parallel ranks."""

    def whole(self) -> AbstractContextManager[None]:
        """Within it every rank holds its model-parallel part of the parameters whole; a collective call.

        Where data-parallel ranks share parameters out (ZeRO-3), what the first of them writes into its own is what all
        have afterwards.
        """

    def begin_step(self) -> None:
        """Set gradients to zero."""

    def finish_step(self) -> float:
        """Clip, update parameters, advance the schedule. Returns the gradient norm before clipping."""

    @property
    def lr(self) -> float:
        """Learning rate of the last update (of parameters with no multiplier of their own)."""

    def sharded_state_dict(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """Optimizer and schedule state, placed in the whole model, for dist_checkpointing; see `optim.state`.

        Args:
            model_state: the model's, made within `whole`, with its parameters themselves as data.
            loading: whether it is to be filled from a checkpoint.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `sharded_state_dict(loading=True)` was filled with."""
