"""ZeRO-2 and ZeRO-3: DeepSpeed's engine as the only model chunk of Megatron's schedule without a pipeline.

The engine reduces gradients in every micro-batch's backward pass and gives each data-parallel rank its shard. With
ZeRO-3, parameters are sharded too, and gathered when used (Rajbhandari et al. 2020, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters, parameter_offload
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.deepspeed_groups import GroupsForDeepSpeed, join_process_group
from megatron_ext.optim.deepspeed_steps import DeepSpeedStep
from megatron_ext.optim.fp32_values import Master
from megatron_ext.optim.parameter_groups import parameter_groups
from megatron_ext.optim.registry import algorithm_of
from megatron_ext.optim.schedule import make_schedule
from megatron_ext.optim.state import FlatSlice, make_moments
from megatron_ext.optim.zero1 import linked_masters, linked_slices, make_linked_moments
from megatron_ext.platform.adamw import AdamW
from megatron_ext.platform.device import Platform

# DeepSpeed compares types exactly, and would warn that this subclass of torch's AdamW is untested.
if AdamW not in ZERO_SUPPORTED_OPTIMIZERS:
    ZERO_SUPPORTED_OPTIMIZERS.append(AdamW)


class EngineRunOptimizer(RunOptimizer):
    """`RunOptimizer` for DeepSpeed's engine at stage 2 or 3.

    Args:
        chunks: the model, one chunk.
        config: settings of the optimizer.
        steps: steps of the whole run: the length of the schedule.
        groups: process groups.
        platform: device and back-end of this run.
        settings: the whole DeepSpeed configuration.

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
        algorithm = algorithm_of(config)
        base = algorithm.build(parameter_groups(chunks), config)
        self._engine, *_ = deepspeed.initialize(
            model=chunk,
            optimizer=base,
            mpu=GroupsForDeepSpeed(groups),
            config=dict(settings),
            dist_init_required=False,
        )
        self._zero = self._engine.optimizer
        self._algorithm = algorithm
        self._step = DeepSpeedStep(self._zero, self._engine)
        self._groups = groups
        self._parameters = list(chunk.parameters())
        self._shards_parameters = settings["zero_optimization"]["stage"] == 3
        get_model_config(chunk).finalize_model_grads_func = self._count_tokens
        if self._shards_parameters:
            self._make_moments_of_shards()
        schedule = make_schedule(base, config, steps)
        super().__init__([EngineChunk(self._engine)], [base], schedule, shards_state=True, group=groups.dp_cp)

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Implement `RunOptimizer.gathered_parameters`."""
        if not self._shards_parameters:
            return nullcontext()
        return GatheredParameters(self._parameters, modifier_rank=0)

    @contextmanager
    def evaluation_chunks(self) -> Iterator[Sequence[torch.nn.Module]]:
        """Implement `RunOptimizer.evaluation_chunks`. The engine would expect a backward pass per forward pass."""
        with self.gathered_parameters(), self._without_hooks():
            yield [self._engine.module]

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Context manager under which ZeRO-3 does not gather parameters on use. It traces their order anew later."""
        if not self._shards_parameters:
            yield
            return
        hooks = self._zero.parameter_offload
        hooks._remove_module_hooks()
        for hook_list in (hooks.forward_hooks, hooks.backward_hooks):
            hook_list.clear()
        try:
            yield
        finally:
            parameter_offload.FWD_MODULE_STACK.pop()  # the model, which the next line pushes again
            hooks.setup_zero_stage3_hooks()

    def begin_step(self) -> None:
        """Do nothing: the engine's own step sets gradients to zero."""

    def compute_grad_norm(self) -> float:
        """Implement `RunOptimizer.compute_grad_norm`."""
        self.make_moments()
        return self._step.compute_grad_norm()

    def _update(self) -> None:
        """Implement `RunOptimizer._update`."""
        self._step.update()

    def drop_gradients(self) -> None:
        """Implement `RunOptimizer.drop_gradients`: DeepSpeed releases its buffers."""
        self._step.drop_gradients()

    def _count_tokens(self, chunks: Sequence[torch.nn.Module], num_tokens: Tensor, *_: Any, **__: Any) -> None:
        """Divide gradients by the tokens of the batch: replacement of Megatron's `finalize_model_grads`.

        Gradients are already reduced, as averages over ranks of sums over tokens. DeepSpeed divides them by its loss
        scale before the update, so the number of tokens enters there.
        """
        dist.all_reduce(num_tokens, group=self._groups.dp_cp)
        self._zero.loss_scale = float(num_tokens) / self._groups.dp_cp.size()

    def make_moments(self) -> None:
        """Implement `RunOptimizer.make_moments`; with ZeRO-3 the constructor has already allocated them."""
        if not self._shards_parameters:
            make_linked_moments(self._zero, self._algorithm)

    def _make_moments_of_shards(self) -> None:
        """Allocate the moments of this rank's ZeRO-3 shards, before there are gradients.

        State on a disk (NVMe) is swapped in and out for this. Once there are gradients, swapping would lose them.
        """
        zero = self._zero
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            on_disk = zero._swappable_optimizer_subgroup(number)
            if on_disk:
                zero._optimizer_states_and_gradient_swap_in(number)
            make_moments(zero.optimizer, self._algorithm, [flat])  # its groups are empty between steps
            if on_disk:
                zero._optimizer_states_and_gradient_swap_out(number)

    def restore_state(self, slices: Sequence[FlatSlice], plain: dict[str, Any]) -> None:
        """Implement `RunOptimizer.restore_state`; state on a disk is written back."""
        for flat_slice in slices:
            if self._on_disk(flat_slice.parameter):
                self._write_to_disk(flat_slice)
        super().restore_state(slices, plain)

    def slices(self) -> Iterator[FlatSlice]:
        """Implement `RunOptimizer.slices`."""
        if not self._shards_parameters:
            yield from linked_slices(self._zero, self._algorithm)
            return
        for parameter in self._parameters:
            shard = self._shard(parameter, ("param", *self._algorithm.moments))
            if shard is not None:
                yield shard

    def masters(self, parameters: Sequence[Tensor]) -> Iterator[Master]:
        """Implement `RunOptimizer.masters`."""
        if not self._shards_parameters:
            yield from linked_masters(parameters)
            return
        for parameter in parameters:
            shard = self._shard(parameter, ("param",))
            if shard is not None:
                yield Master(parameter, shard.start, shard.tensors["param"])

    def _write_master(self, master: Master, values: Tensor) -> None:
        """Implement `RunOptimizer._write_master`; a copy on a disk is written back."""
        super()._write_master(master, values)
        if self._on_disk(master.parameter):
            self._write_to_disk(FlatSlice(master.parameter, master.start, {"param": master.values}))

    def _shard(self, parameter: Any, kinds: Sequence[str]) -> FlatSlice | None:
        """Return the ZeRO-3 shard of a parameter on this rank; None if the shard contains only padding.

        Shards have equal sizes, so the last ones are padded.
        """
        size, numel = parameter.ds_tensor.ds_numel, parameter.ds_numel
        start = dist.get_rank(parameter.ds_process_group) * size
        if start >= numel:
            return None
        length, tensors = min(size, numel - start), {}
        on_disk = self._on_disk(parameter)
        for kind in kinds:
            # DeepSpeed's public functions for this would copy offloaded state to the GPU.
            state = None if kind == "param" else kind
            state_tensor, _ = self._zero._get_fp32_opt_state_partition(parameter, True, state)
            # State on a disk is read into a buffer that the next read reuses.
            tensors[kind] = (state_tensor.clone() if on_disk else state_tensor).detach()[:length]
        return FlatSlice(parameter, start, tensors)

    def _on_disk(self, parameter: Any) -> bool:
        """Return True if DeepSpeed keeps this parameter's optimizer state on a disk."""
        if not self._shards_parameters:
            return False
        group, *_ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return bool(self._zero._swappable_optimizer_subgroup(group))

    def _write_to_disk(self, flat_slice: FlatSlice) -> None:
        parameter: Any = flat_slice.parameter
        for kind, tensor in flat_slice.tensors.items():
            padded = tensor.new_zeros(parameter.ds_tensor.ds_numel)
            padded[: len(tensor)] = tensor
            self._zero.set_local_hp_param(padded, parameter, None if kind == "param" else kind)


class EngineChunk(torch.nn.Module):
    """DeepSpeed's engine with the interface that Megatron's schedules expect of a model chunk.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine: Any
        object.__setattr__(self, "_engine", engine)  # not a submodule: its parameters are those of `module`
        self.module = engine.module
        self.config = get_model_config(engine.module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Call the chunk through the engine, which prepares its backward pass."""
        return self._engine(*inputs, **kwargs)

    def train(self, mode: bool = True) -> EngineChunk:
        """Set training or evaluation mode of this module and of the engine."""
        self._engine.train(mode)
        self.training = mode
        return self


def _sum_over_sequence_parallel_ranks(chunk: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Sum gradients over sequence-parallel ranks in hooks.

    Megatron would sum them after the backward pass, but by then the engine has sharded them. The hooks run before the
    engine's own, which its initialisation registers.
    """

    def all_reduce_gradient(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=tp_group)
        return gradient

    for parameter in chunk.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(all_reduce_gradient)
