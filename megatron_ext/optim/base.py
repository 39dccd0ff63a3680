"""The one interface behind which every optimizer stands: Megatron's, and DeepSpeed's ZeRO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_ext.optim.fp32_values import Master, spread, values_at
from megatron_ext.optim.schedule import go_on_from
from megatron_ext.optim.state import Stretch, set_steps
from megatron_ext.parallel.fp32_values import stored, with_fp32_values


class RunOptimizer(ABC):
    """Owns the wrapped model chunks, their gradients, the optimizer and the learning-rate schedule.

    Args:
        chunks: model chunks of this rank, wrapped: gradients accumulate in fp32, reduced over data-parallel ranks.
        adams: what updates them.
        schedule: of their learning rate.
        shares_state: whether data-parallel ranks hold different parts of the optimizer's state.
        group: of those ranks, which hold the same part of the model.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        adams: Sequence[torch.optim.Optimizer],
        schedule: OptimizerParamScheduler,
        *,
        shares_state: bool,
        group: dist.ProcessGroup,
    ) -> None:
        self.chunks = chunks
        self._modules = [module for chunk in chunks for module in chunk.modules()]
        self._adams, self._scheduler, self.shares_state = adams, schedule, shares_state
        self._skipped = 0
        self._group = group if shares_state else None
        self._in_fp32 = with_fp32_values(
            p for module in self._modules for p in module._parameters.values() if p is not None
        )
        self._begin_with_fp32_values()

    # --- a step ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Set gradients to zero."""

    def finish_step(self, goes_on: Callable[[float], bool]) -> None:
        """Clip the gradients, update parameters, advance the schedule; or drop the gradients, and all stays as it was.

        Args:
            goes_on: which of them, by the gradient's norm over all ranks, before clipping; inf or nan if it is not
                finite. On every rank alike.
        """
        updated = False

        def at_next_rate(grad_norm: float) -> bool:
            nonlocal updated
            updated = goes_on(grad_norm)
            if updated:
                self._scheduler.step(increment=1)  # before the update: step 1 already has a rate above zero
            return updated

        self._finish_step(at_next_rate)
        if updated:
            self._spread_fp32_values()

    @abstractmethod
    def _finish_step(self, goes_on: Callable[[float], bool]) -> None:
        """Clip the gradients and update parameters, or drop the gradients."""

    def skip(self) -> None:
        """Let a step whose gradients were dropped count as done: the schedule goes on, Adam's own count does not."""
        self._scheduler.step(increment=1)
        self._skipped += 1

    @property
    def lr(self) -> float:
        """Learning rate of the last update (of parameters with no multiplier of their own)."""
        return float(self._adams[0].param_groups[0]["lr"])

    def testing(self) -> AbstractContextManager[Sequence[torch.nn.Module]]:
        """Gives the chunks for tests between steps; a collective call.

        Within it each rank holds its model-parallel part of all parameters, and its forward passes are no one else's
        affair but its model-parallel group's: data-parallel ranks may make more or fewer.
        """
        return nullcontext(self.chunks)

    # --- its state ---------------------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """Within it every rank holds its model-parallel part of the parameters whole; a collective call.

        Where data-parallel ranks share parameters out (ZeRO-3), what the first of them writes into its own is what all
        have afterwards.
        """
        return nullcontext()

    def held_by_model(self) -> list[Tensor]:
        """What is `stored` of parameters and buffers, as it lies in memory, in an order that stays.

        One that is shared comes more than once.
        """
        # Not by parameters() and buffers(), which look for what is shared: a save has training wait for this.
        return [
            stored(tensor).detach()
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]

    @abstractmethod
    def make_moments(self) -> None:
        """Make Adam's moments, if there are none: the first step would, and a checkpoint is loaded into them."""

    @abstractmethod
    def stretches(self) -> Iterator[Stretch]:
        """Optimizer state as this rank holds it, in an order that stays; what is written into it is to be `take`n."""

    def plain_state(self) -> dict[str, Any]:
        """What of its state is no tensor."""
        return {"schedule": {**self._scheduler.state_dict(), "skipped": self._skipped}}

    def take(self, stretches: Sequence[Stretch], plain: dict[str, Any]) -> None:
        """Go on from a saved state.

        Args:
            stretches: this rank's, the saved values written into them.
            plain: as it was saved.
        """
        done = go_on_from(self._scheduler, plain["schedule"])
        self._skipped = int(plain["schedule"].get("skipped", 0))  # older checkpoints do not say: there was no skipping
        for adam in self._adams:
            set_steps(adam, done - self._skipped)
        self._spread_fp32_values()

    # --- fp32 values beside parameters -------------------------------------------------------------------------------

    @abstractmethod
    def masters(self, parameters: Sequence[Tensor]) -> Iterator[Master]:
        """The fp32 copies of some parameters as this rank holds them; views where the optimizer has them."""

    def _write_master(self, master: Master, values: Tensor) -> None:
        """Give an optimizer's copy its values."""
        master.values.copy_(values)

    def _begin_with_fp32_values(self) -> None:
        """Let the optimizer's copies begin with the initial values themselves; they were made from rounded ones."""
        for master in self.masters(self._in_fp32):
            self._write_master(master, values_at(master))

    def _spread_fp32_values(self) -> None:
        """Let the forward pass have what the optimizer holds; a collective call."""
        spread(self._in_fp32, self.masters(self._in_fp32), self._group)
