"""Megatron's AdamW, whole on every data-parallel rank or sharded over them (its distributed optimizer)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.placing import placed
from megatron_ext.platform import DTYPES, Platform

_SCHEDULES = {"cosine": "cosine", "wsd": "WSD", "constant": "constant"}

SHARDING = "fully_sharded_model_space"
"""What Megatron calls a state whose pieces are placed in the parameters' own shapes."""


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
        for part in self._parts() if self._sharded else []:
            part.sharded_param_state_fs_model_space = partial(_placed_state, part)
        self._scheduler = _schedule(self._optimizer, config, steps)
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

    def sharded_state_dict(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """Optimizer and schedule state, placed in the whole model, for dist_checkpointing."""
        # torch's AdamW has no state before its first step, and the state is described by what is there.
        if loading and self._sharded:
            self._make_optimizer_state()
        # Stored a parameter at a time in the model's own shapes, whatever the layout was.
        metadata = {"distrib_optim_sharding_type": SHARDING, "chained_optim_avoid_prefix": True}
        with self._platform.optimizer_context():
            state = self._optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
        for own in _with_pieces(state):
            own["param_state_sharding_type"] = "fully_reshardable"  # as whoever loads it with Megatron's own code may
        return {"optimizer": state, "schedule": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `sharded_state_dict(loading=True)` was filled with."""
        for own in _with_pieces(state["optimizer"]):
            del own["param_state"]  # has been filled where it is
        with self._platform.optimizer_context():
            self._optimizer.load_state_dict(state["optimizer"])
        self._give_each_parameter_its_own_step()
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=int(state["schedule"]["num_steps"]))

    def _parts(self) -> list[Any]:
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _make_optimizer_state(self) -> None:
        for part in self._parts():
            if not part.optimizer.state:
                part._init_optimizer_states_with_dummy_values()

    def _give_each_parameter_its_own_step(self) -> None:
        """Megatron loads ONE step tensor into every parameter's state, and torch's AdamW would add to it for each."""
        for part in self._parts():
            for state in part.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()


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


def _schedule(optimizer: Any, config: OptimizerConfig, steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(steps, config.warmup_steps + 1),
        lr_decay_style=_SCHEDULES[config.schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=config.decay_steps,
        lr_wsd_decay_style="linear",
    )


def _placed_state(part: DistributedOptimizer, model_state: dict[str, Any], *_: Any) -> dict[int, Any]:
    """This rank's pieces of main parameters and moments, in place of what Megatron (0.16.1) can no longer write."""
    model_state, _ = extract_sharded_tensors_and_factories(model_state)
    places = {place.data: place for place in nested_values(model_state)}
    ranges = (pieces for buffer in part.gbuf_ranges for buckets in buffer.values() for pieces in buckets)
    state: dict[int, Any] = {}
    for pieces in ranges:
        for parameter, piece in pieces["param_map"].items():
            tensors = part._get_main_param_and_optimizer_states(parameter)
            flat = {f"optimizer.state.{name}": tensor for name, tensor in tensors.items() if name != "step"}
            place, span = places[parameter], piece["param"]
            # Data-parallel ranks have no piece twice.
            replica_id = (*place.replica_id[:2], part.distributed_optimizer_instance_id)
            state[len(state)] = placed(place, span.start, span.end, flat, replica_id)
    return state


def _with_pieces(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The states of distributed optimizers in a state of one optimizer, or of several by number."""
    return [own for own in (state, *state.values()) if isinstance(own, dict) and "param_state" in own]
