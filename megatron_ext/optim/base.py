"""The one interface behind which every optimizer stands: Megatron's, and DeepSpeed's ZeRO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.optim.schedule import go_on_from
from megatron_ext.optim.state import Stretch, placed_state, set_steps


class RunOptimizer(ABC):
    """Owns the wrapped model chunks, their gradients, the optimizer and the learning-rate schedule.

    Args:
        chunks: model chunks of this rank, wrapped: gradients accumulate in fp32, reduced over data-parallel ranks.
        adams: what updates them.
        schedule: of their learning rate.
        sharded: whether data-parallel ranks hold different parts of the optimizer's state.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        adams: Sequence[torch.optim.Optimizer],
        schedule: OptimizerParamScheduler,
        *,
        sharded: bool,
    ) -> None:
        self.chunks = chunks
        self._adams, self._scheduler, self._sharded = adams, schedule, sharded
        self._filled: list[Stretch] = []  # while a checkpoint is loaded

    # --- a step ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Set gradients to zero."""

    def finish_step(self) -> float:
        """Clip, update parameters, advance the schedule. Returns the gradient norm before clipping."""
        self._scheduler.step(increment=1)  # before the update: step 1 already has a rate above zero
        return self._update()

    @abstractmethod
    def _update(self) -> float:
        """Clip and update parameters. Returns the gradient norm before clipping."""

    @property
    def lr(self) -> float:
        """Learning rate of the last update (of parameters with no multiplier of their own)."""
        return float(self._adams[0].param_groups[0]["lr"])

    # --- its state ---------------------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """Within it every rank holds its model-parallel part of the parameters whole; a collective call.

        Where data-parallel ranks share parameters out (ZeRO-3), what the first of them writes into its own is what all
        have afterwards.
        """
        return nullcontext()

    @abstractmethod
    def stretches(self) -> Iterator[Stretch]:
        """Optimizer state as this rank holds it, in an order that stays."""

    def plain_state(self) -> dict[str, Any]:
        """What of `sharded_state_dict` is no tensor."""
        return {"schedule": self._scheduler.state_dict()}

    def sharded_state_dict(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """Optimizer and schedule state, placed in the whole model, for dist_checkpointing; see `optim.state`.

        Args:
            model_state: the model's, made within `whole`, with its parameters themselves as data.
            loading: whether it is to be filled from a checkpoint.
        """
        # There is no state before the first step, and the state is described by what is there.
        if loading:
            self._make_moments()
        stretches = list(self.stretches())
        if loading:
            self._filled = stretches
        return {"state": placed_state(model_state, stretches, sharded=self._sharded), **self.plain_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `sharded_state_dict(loading=True)` was filled with: it was filled in place."""
        self._filled = []
        done = go_on_from(self._scheduler, state["schedule"])
        for adam in self._adams:
            set_steps(adam, done)

    @abstractmethod
    def _make_moments(self) -> None:
        """Make Adam's moments, if there are none: the first step would."""
