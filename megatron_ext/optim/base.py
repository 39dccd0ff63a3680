"""Common interface of all optimizers: Megatron's, and DeepSpeed's ZeRO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_ext.optim.fp32_values import Master, values_at, write_fp32_values
from megatron_ext.optim.schedule import resume_schedule
from megatron_ext.optim.state import FlatSlice, set_steps
from megatron_ext.parallel.fp32_values import stored, with_fp32_values


class RunOptimizer(ABC):
    """Base class that owns the wrapped model chunks, their gradients, the optimizer and the learning-rate schedule.

    Args:
        chunks: wrapped model chunks of this rank; gradients accumulate in fp32 and are reduced over data-parallel
            ranks.
        optimizers: torch optimizers that update the parameters.
        schedule: learning-rate schedule of all optimizers.
        shards_state: True if the optimizer state is sharded over data-parallel ranks.
        group: data-parallel group, whose ranks hold the same part of the model.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: OptimizerParamScheduler,
        *,
        shards_state: bool,
        group: dist.ProcessGroup,
    ) -> None:
        self.chunks = chunks
        self._modules = [module for chunk in chunks for module in chunk.modules()]
        self._optimizers, self._scheduler, self.shards_state = optimizers, schedule, shards_state
        self._skipped = 0
        self._group = group if shards_state else None
        self._fp32_parameters = with_fp32_values(
            p for module in self._modules for p in module._parameters.values() if p is not None
        )
        self._initialize_masters()

    # --- steps -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Set gradients to zero."""

    @abstractmethod
    def compute_grad_norm(self) -> float:
        """Return the gradient norm over all ranks, before clipping; inf or nan if it is not finite. A collective call.

        Call this method once per step, after the backward passes, and then either `step` or `drop_gradients`, with the
        same choice on every rank.
        """

    def step(self) -> None:
        """Clip the gradients by the computed norm and update the parameters at the schedule's next rate.

        A collective call.
        """
        self._scheduler.step(increment=1)  # before the update, so that step 1 has a rate above zero
        self._update()
        self._update_fp32_values()

    @abstractmethod
    def _update(self) -> None:
        """Clip the gradients and update the parameters."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Discard the gradients, instead of calling `step`. Parameters, optimizer state and schedule do not change."""

    def skip(self) -> None:
        """Count a step whose gradients were dropped: advance the schedule, but not the optimizer's step count."""
        self._scheduler.step(increment=1)
        self._skipped += 1

    @property
    def lr(self) -> float:
        """Learning rate of the last update, for parameters without a multiplier."""
        return float(self._optimizers[0].param_groups[0]["lr"])

    def evaluation_chunks(self) -> AbstractContextManager[Sequence[torch.nn.Module]]:
        """Return a context manager that provides the chunks for tests between steps; a collective call.

        Within the context, each rank holds its complete model-parallel shard of the parameters. Forward passes then
        involve only the model-parallel group, so data-parallel ranks may run different numbers of forward passes.
        """
        return nullcontext(self.chunks)

    # --- state -------------------------------------------------------------------------------------------------------

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Return a context manager under which no parameter is sharded over data-parallel ranks; a collective call.

        Within the context, each rank holds its complete model-parallel shard of the parameters. With ZeRO-3, the values
        that the first data-parallel rank writes to its parameters replace those of the other ranks on exit.
        """
        return nullcontext()

    def model_tensors(self) -> list[Tensor]:
        """Return the `stored` tensors of parameters and buffers, as they are in memory, in a fixed order.

        A shared tensor appears more than once.
        """
        # parameters() and buffers() would spend time on removing duplicates, and a save blocks training meanwhile.
        return [
            stored(tensor).detach()
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]

    @abstractmethod
    def make_moments(self) -> None:
        """Allocate the optimizer's state tensors if there are none.

        The first step would allocate them, but a checkpoint may be loaded into them before.
        """

    @abstractmethod
    def slices(self) -> Iterator[FlatSlice]:
        """Iterate over the optimizer state of this rank, in a fixed order.

        Call `restore_state` after writing to the state.
        """

    def plain_state(self) -> dict[str, Any]:
        """Return the state that is not in tensors."""
        return {"schedule": {**self._scheduler.state_dict(), "skipped": self._skipped}}

    def restore_state(self, slices: Sequence[FlatSlice], plain: dict[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            slices: state of this rank, with the saved values written to it.
            plain: saved result of `plain_state`.
        """
        completed_steps = resume_schedule(self._scheduler, plain["schedule"])
        self._skipped = int(plain["schedule"].get("skipped", 0))  # absent in older checkpoints: no skips
        for optimizer in self._optimizers:
            set_steps(optimizer, completed_steps - self._skipped)
        self._update_fp32_values()

    # --- fp32 values of parameters -----------------------------------------------------------------------------------

    @abstractmethod
    def masters(self, parameters: Sequence[Tensor]) -> Iterator[Master]:
        """Iterate over the optimizer's fp32 copies of parameters on this rank, if possible as views of its tensors."""

    def _write_master(self, master: Master, values: Tensor) -> None:
        """Write values to one of the optimizer's fp32 copies."""
        master.values.copy_(values)

    def _initialize_masters(self) -> None:
        """Write the exact initial values to the optimizer's fp32 copies, which were made from rounded values."""
        for master in self.masters(self._fp32_parameters):
            self._write_master(master, values_at(master))

    def _update_fp32_values(self) -> None:
        """Copy the optimizer's fp32 copies to the parameters' fp32 values; a collective call."""
        write_fp32_values(self._fp32_parameters, self.masters(self._fp32_parameters), self._group)
