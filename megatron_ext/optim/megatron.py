"""Megatron's AdamW, whole on every data-parallel rank or sharded over them (its distributed optimizer)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.schedule import go_on_from, make_schedule
from megatron_ext.optim.state import MOMENTS, Stretch, make_moments, placed_state, set_steps
from megatron_ext.platform import DTYPES, Platform


class MegatronRunOptimizer:
    """`RunOptimizer` over Megatron's DistributedDataParallel and optimizer.

    Args:
        chunks: model chunks of this rank, not yet wrapped.
        config: of the optimizer.
        steps: of the whole run: the length of the schedule.
        precision: bf16 or fp32.
        groups: process groups.
        platform: where this runs.
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
        self._platform = platform
        self._sharded = config.sharding == "megatron"
        self._chunks = [self._wrap(chunk, groups) for chunk in chunks]
        with platform.optimizer_context():
            megatron_config = _megatron_config(config, precision)
            overrides = get_standard_config_overrides(megatron_config)  # vectors have no weight decay
            overrides[ParamKey(attr="no_weight_decay")] = ParamGroupOverride(wd_mult=0.0)
            self._optimizer = get_megatron_optimizer(megatron_config, self._chunks, config_overrides=overrides)
        self._scheduler = make_schedule(self._optimizer, config, steps)
        transformer_config = get_model_config(self._chunks[0])
        transformer_config.finalize_model_grads_func = finalize_model_grads
        transformer_config.grad_scale_func = self._optimizer.scale_loss

    def _wrap(self, chunk: MegatronModule, groups: ProcessGroupCollection) -> DistributedDataParallel:
        wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=self._sharded)
        return DistributedDataParallel(get_model_config(chunk), wrapping, chunk)

    @property
    def chunks(self) -> Sequence[torch.nn.Module]:
        """Model chunks of this rank, wrapped."""
        return self._chunks

    def begin_step(self) -> None:
        """Set gradients to zero."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def finish_step(self) -> float:
        """Clip, update parameters, advance the schedule. Returns the gradient norm before clipping."""
        self._scheduler.step(increment=1)  # before the update: step 1 already has a rate above zero
        with self._platform.optimizer_context():
            _updated, grad_norm, _zeros = self._optimizer.step()
        return float(grad_norm)

    @property
    def lr(self) -> float:
        """Learning rate of the last update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def whole(self) -> AbstractContextManager[None]:
        """Nothing to do: parameters are whole on every rank."""
        return nullcontext()

    def sharded_state_dict(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """Optimizer and schedule state, placed in the whole model, for dist_checkpointing."""
        # There is no state before the first step, and the state is described by what is there.
        if loading:
            self._make_optimizer_state()
        state = placed_state(model_state, self.stretches(), sharded=self._sharded)
        return {"state": state, "schedule": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `sharded_state_dict(loading=True)` was filled with: it was filled in place."""
        done = go_on_from(self._scheduler, state["schedule"])
        for part in self._parts():
            set_steps(part.optimizer, done)

    def stretches(self) -> Iterator[Stretch]:
        """Optimizer state as this rank holds it."""
        for part in self._parts():
            sharded = isinstance(part, DistributedOptimizer)
            for parameter, start, main in _of_distributed(part) if sharded else _of_whole(part):
                moments = {moment: part.optimizer.state[main][moment].view(-1) for moment in MOMENTS}
                yield Stretch(parameter, start, {"param": main.detach().view(-1), **moments})

    def _parts(self) -> list[Any]:
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _make_optimizer_state(self) -> None:
        for part in self._parts():
            if part.optimizer.state:
                continue
            if isinstance(part.optimizer, torch.optim.AdamW):
                make_moments(part.optimizer)
            else:
                part.init_state_fn(part.optimizer, part.config)


def _of_distributed(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Each parameter that this rank updates a stretch of, where that begins, and its precise values."""
    for parameter, (group, order) in part.model_param_group_index_map.items():
        start = part._get_model_param_range_map(parameter)["param"].start
        yield parameter, start, part.optimizer.param_groups[group]["params"][order]


def _of_whole(part: Any) -> Iterator[tuple[Tensor, int, Tensor]]:
    """The same where every rank updates all."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for groups in ((part.float16_groups, part.fp32_from_float16_groups), (part.fp32_from_fp32_groups,) * 2):
            for parameters, mains in zip(*groups, strict=True):
                yield from ((p, 0, main) for p, main in zip(parameters, mains, strict=True))
    else:
        yield from ((p, 0, p) for p in part.get_parameters())


def _megatron_config(config: OptimizerConfig, precision: str) -> MegatronOptimizerConfig:
    dtype = DTYPES[precision]
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.epsilon,
        clip_grad=config.clip_grad or math.inf,  # Megatron leaves the norm uncomputed where it is 0
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.sharding == "megatron",
    )
