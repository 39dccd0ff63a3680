"""ZeRO-2 and ZeRO-3: DeepSpeed's engine as the one model chunk of Megatron's schedule without a pipeline.

The engine reduces gradients in every micro-batch's backward pass and gives each data-parallel rank its part; with
ZeRO-3 parameters, too, are shared out, and gathered around their use (Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.deepspeed_groups import GroupsForDeepSpeed, join_process_group
from megatron_ext.optim.parameter_groups import adamw
from megatron_ext.optim.schedule import make_schedule
from megatron_ext.optim.state import MOMENTS, Stretch, make_moments
from megatron_ext.optim.zero1 import linked_stretches, make_linked_moments
from megatron_ext.platform import Platform


class EngineRunOptimizer(RunOptimizer):
    """`RunOptimizer` over DeepSpeed's engine, at stage 2 or 3.

    Args:
        chunks: the model, one chunk.
        config: of the optimizer.
        steps: of the whole run: the length of the schedule.
        groups: process groups.
        platform: where this runs.
        settings: DeepSpeed's configuration, whole.

    Raises:
        UserError: the model has parameters of several dtypes.
    """

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        config: OptimizerConfig,
        steps: int,
        groups: ProcessGroupCollection,
        platform: Platform,
        settings: Mapping[str, Any],
    ) -> None:
        (chunk,) = chunks
        join_process_group(platform.communication)
        _sum_over_sequence_parallel_ranks(chunk, groups.tp)
        base = adamw(chunks, config)
        self._engine, *_ = deepspeed.initialize(
            model=chunk,
            optimizer=base,
            mpu=GroupsForDeepSpeed(groups),
            config=dict(settings),
            dist_init_required=False,
        )
        self._zero = self._engine.optimizer
        self._groups = groups
        self._parameters = list(chunk.parameters())
        self._shares_parameters = settings["zero_optimization"]["stage"] == 3
        get_model_config(chunk).finalize_model_grads_func = self._count_tokens
        super().__init__([EngineChunk(self._engine)], [base], make_schedule(base, config, steps), sharded=True)

    def whole(self) -> AbstractContextManager[None]:
        """Within it every rank holds its model-parallel part of the parameters whole; a collective call."""
        if not self._shares_parameters:
            return nullcontext()
        return GatheredParameters(self._parameters, modifier_rank=0)

    def begin_step(self) -> None:
        """Nothing: the engine's own step leaves gradients at zero."""

    def _update(self) -> float:
        self._make_moments()
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def _count_tokens(self, chunks: Sequence[torch.nn.Module], num_tokens: Tensor, *_: Any, **__: Any) -> None:
        """What Megatron calls when all micro-batches are through: gradients are reduced by then, as averages of sums.

        DeepSpeed divides them by its loss scale on the way to the optimizer, so that is where the tokens go.
        """
        dist.all_reduce(num_tokens, group=self._groups.dp_cp)
        self._zero.loss_scale = float(num_tokens) / self._groups.dp_cp.size()

    def _make_moments(self) -> None:
        if self._shares_parameters:  # its groups are empty between steps
            make_moments(self._zero.optimizer, self._zero.fp32_partitioned_groups_flat)
        else:
            make_linked_moments(self._zero)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `sharded_state_dict(loading=True)` was filled with."""
        if self._shares_parameters:
            for stretch in self._filled:
                _set_share(stretch)
        super().load_state_dict(state)

    def stretches(self) -> Iterator[Stretch]:
        """Optimizer state as this rank holds it."""
        if not self._shares_parameters:
            yield from linked_stretches(self._zero)
            return
        for parameter in self._parameters:
            share = _share(parameter)
            if share is not None:
                yield share


class EngineChunk(torch.nn.Module):
    """The engine as Megatron's schedules want a model chunk.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine: Any
        object.__setattr__(self, "_engine", engine)  # no child: its parameters are the module's
        self.module = engine.module
        self.config = get_model_config(engine.module)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """As the chunk's; the engine notes what it must do in the backward pass."""
        return self._engine(*inputs, **named)

    def train(self, mode: bool = True) -> EngineChunk:
        """Set training or evaluation mode of the engine, too."""
        self._engine.train(mode)
        self.training = mode
        return self


def _sum_over_sequence_parallel_ranks(chunk: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Sum gradients that Megatron would sum after the backward pass: by then the engine has shared them out.

    The hooks stand before the engine's own, which it makes at its initialisation.
    """

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=tp_group)
        return gradient

    for parameter in chunk.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(summed)


def _share(parameter: Any) -> Stretch | None:
    """The share of a parameter that ZeRO-3 gave this rank; None where others have all of it.

    Shares are of one size, so the last ones are padded.
    """
    size, numel = parameter.ds_tensor.ds_numel, parameter.ds_numel
    start = dist.get_rank(parameter.ds_process_group) * size
    if start >= numel:
        return None
    tensors = {"param": safe_get_local_fp32_param(parameter)}
    tensors |= {moment: safe_get_local_optimizer_state(parameter, moment) for moment in MOMENTS}
    length = min(size, numel - start)
    return Stretch(parameter, start, {kind: tensor.detach()[:length] for kind, tensor in tensors.items()})


def _set_share(stretch: Stretch) -> None:
    """Write a share back: what was read may have been a copy of what lies on the CPU or a disk."""
    parameter: Any = stretch.parameter
    for kind, tensor in stretch.tensors.items():
        padded = tensor.new_zeros(parameter.ds_tensor.ds_numel)
        padded[: len(tensor)] = tensor
        if kind == "param":
            safe_set_local_fp32_param(parameter, padded)
        else:
            safe_set_local_optimizer_state(parameter, padded, kind)
