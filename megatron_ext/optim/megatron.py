"""Megatron's optimizers: state replicated over data-parallel ranks, or sharded by its distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer import (
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.algorithm import Algorithm
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.fp32_values import Master
from megatron_ext.optim.registry import algorithm_of
from megatron_ext.optim.schedule import make_schedule
from megatron_ext.optim.state import FlatSlice, make_moments
from megatron_ext.platform.device import DTYPES, Platform
from megatron_ext.platform.megatron_versions import ddp_layout


class MegatronRunOptimizer(RunOptimizer):
    """`RunOptimizer` for Megatron's DistributedDataParallel and optimizer.

    Args:
        chunks: model chunks of this rank, not yet wrapped.
        config: settings of the optimizer.
        steps: steps of the whole run: the length of the schedule.
        precision: bf16 or fp32.
        groups: process groups.
        platform: device and back-end of this run.
    """

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        config: OptimizerConfig,
        steps: int,
        precision: str,
        groups: ProcessGroupCollection,
        platform: Platform,
    ) -> None:
        sharded = config.sharding == "megatron"
        overlapped = groups.dp_cp.size() > 1
        self._wrapped = wrapped = [_wrap(chunk, sharded, overlapped) for chunk in chunks]
        with platform.optimizer_context():
            algorithm = algorithm_of(config)
            fields = algorithm.megatron_fields(config)
            megatron_config = _megatron_config(config, precision, _PLACEHOLDER if fields is None else fields)
            overrides = get_standard_config_overrides(megatron_config)  # vectors have no weight decay
            overrides[ParamKey(attr="no_weight_decay")] = ParamGroupOverride(wd_mult=0.0)
            self._optimizer = get_megatron_optimizer(megatron_config, wrapped, config_overrides=overrides)
            self._parts: list[Any] = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
            if fields is None:
                for part in self._parts:
                    _replace_optimizer(part, algorithm, config)
        transformer_config = get_model_config(chunks[0])
        transformer_config.finalize_model_grads_func = finalize_model_grads
        transformer_config.grad_scale_func = self._optimizer.scale_loss
        if overlapped:  # schedules disable gradient reduction until the last micro-batch
            no_sync_contexts = [chunk.no_sync for chunk in wrapped]
            transformer_config.no_sync_func = no_sync_contexts if len(no_sync_contexts) > 1 else no_sync_contexts[0]
        self._platform, self._clip_grad, self._grad_norm = platform, config.clip_grad, 0.0
        self._algorithm = algorithm
        schedule = make_schedule(self._optimizer, config, steps)
        optimizers = [part.optimizer for part in self._parts]
        super().__init__(wrapped, optimizers, schedule, shards_state=sharded, group=groups.dp_cp)

    def begin_step(self) -> None:
        """Set gradients to zero."""
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def compute_grad_norm(self) -> float:
        """Implement `RunOptimizer.compute_grad_norm`: the first half of Megatron's `step`."""
        with self._platform.optimizer_context():
            overflowed = self._optimizer.prepare_grads()
            assert not overflowed, "Megatron checks for overflow only in fp16"
            self._grad_norm = float(self._optimizer.get_grad_norm())
        return self._grad_norm

    def _update(self) -> None:
        """Implement `RunOptimizer._update`: the second half of Megatron's `step`."""
        with self._platform.optimizer_context():
            for part in self._parts:
                parameters = part.get_parameters()
                if parameters and self._clip_grad:
                    clip_grad_by_total_norm_fp32(parameters, self._clip_grad, self._grad_norm)
            self._optimizer.step_with_ready_grads()

    def drop_gradients(self) -> None:
        """Do nothing: `begin_step` sets gradients to zero."""

    def slices(self) -> Iterator[FlatSlice]:
        """Implement `RunOptimizer.slices`."""
        for part in self._parts:
            for parameter, start, main in _fp32_copies(part):
                moments = {moment: part.optimizer.state[main][moment].view(-1) for moment in self._algorithm.moments}
                yield FlatSlice(parameter, start, {"param": main.detach().view(-1), **moments})

    def masters(self, parameters: Sequence[Tensor]) -> Iterator[Master]:
        """Implement `RunOptimizer.masters`."""
        parameter_ids = {id(parameter) for parameter in parameters}
        for part in self._parts if parameter_ids else ():
            for parameter, start, main in _fp32_copies(part):
                if id(parameter) in parameter_ids:
                    yield Master(parameter, start, main.detach().view(-1))

    def make_moments(self) -> None:
        """Implement `RunOptimizer.make_moments`."""
        for part in self._parts:
            if part.optimizer.state:
                continue
            if part.init_state_fn is None or isinstance(part.optimizer, torch.optim.AdamW):
                make_moments(part.optimizer, self._algorithm)
            else:
                part.init_state_fn(part.optimizer, part.config)


def _replace_optimizer(part: Any, algorithm: Algorithm, config: OptimizerConfig) -> None:
    """Replace the torch optimizer inside one of Megatron's by one over the same fp32 parameters."""
    default_keys = part.optimizer.defaults
    groups = [
        {key: value for key, value in group.items() if key not in default_keys} for group in part.optimizer.param_groups
    ]
    part.optimizer, part.init_state_fn = algorithm.build(groups, config), None
    make_moments(part.optimizer, algorithm)


def _wrap(chunk: MegatronModule, sharded: bool, overlapped: bool) -> DistributedDataParallel:
    """Wrap a chunk; if `overlapped`, gradients are reduced in buckets during the backward pass."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=sharded, overlap_grad_reduce=overlapped
    )
    return DistributedDataParallel(get_model_config(chunk), ddp_config, chunk, **ddp_layout(chunk, ddp_config))


def _fp32_copies(part: Any) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Iterate over the parameters that this rank updates (in part): (parameter, first element, fp32 copy)."""
    return _distributed_masters(part) if isinstance(part, DistributedOptimizer) else _unsharded_masters(part)


def _distributed_masters(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Implement `_fp32_copies` for the distributed optimizer, where this rank updates a slice of a parameter."""
    for parameter, (group, index) in part.model_param_group_index_map.items():
        start = part._get_model_param_range_map(parameter)["param"].start
        yield parameter, start, part.optimizer.param_groups[group]["params"][index]


def _unsharded_masters(part: Any) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Implement `_fp32_copies` for optimizers where every rank updates whole parameters."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for groups in ((part.float16_groups, part.fp32_from_float16_groups), (part.fp32_from_fp32_groups,) * 2):
            for parameters, masters in zip(*groups, strict=True):
                yield from ((p, 0, main) for p, main in zip(parameters, masters, strict=True))
    else:
        yield from ((p, 0, p) for p in part.get_parameters())


_PLACEHOLDER = {"optimizer": "sgd", "sgd_momentum": 0.0}
"""Algorithm without state that Megatron builds where `_replace_optimizer` replaces it."""


def _megatron_config(config: OptimizerConfig, precision: str, algorithm: dict[str, Any]) -> MegatronOptimizerConfig:
    dtype = DTYPES[precision]
    return MegatronOptimizerConfig(
        **algorithm,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.sharding == "megatron",
    )
