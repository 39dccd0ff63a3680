"""ZeRO-1: DeepSpeed's optimizer, driven directly under Megatron's schedules, including pipelined ones.

DeepSpeed's engine would replace Megatron's pipeline schedule, so only DeepSpeed's optimizer is used. Megatron
accumulates the gradients of all micro-batches, sums them over tensor-parallel ranks and tied embeddings, and divides
them by the number of tokens. Then DeepSpeed's optimizer reduces them over data-parallel ranks (Rajbhandari et al. 2020,
arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.algorithm import Algorithm
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.deepspeed_groups import GroupsForDeepSpeed, join_process_group
from megatron_ext.optim.deepspeed_steps import DeepSpeedStep
from megatron_ext.optim.fp32_values import Master
from megatron_ext.optim.parameter_groups import parameter_groups
from megatron_ext.optim.registry import algorithm_of
from megatron_ext.optim.schedule import make_schedule
from megatron_ext.optim.state import FlatSlice, make_moments
from megatron_ext.platform.device import Platform


class Zero1RunOptimizer(RunOptimizer):
    """`RunOptimizer` for DeepSpeed's ZeRO-1.

    Args:
        chunks: model chunks of this rank.
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
        join_process_group(platform.communication)
        _count_tied_weights_once(chunks)
        algorithm = algorithm_of(config)
        base = algorithm.build(parameter_groups(chunks), config)
        self._zero = _ZeroOptimizer(
            base,
            {p: f"chunk{number}.{name}" for number, chunk in enumerate(chunks) for name, p in chunk.named_parameters()},
            timers=NoopTimer(),
            optimizer_params=None,
            dp_process_group=groups.dp_cp,
            mpu=GroupsForDeepSpeed(groups),
            clip_grad=config.clip_grad,
            partition_grads=False,
            gradient_average=False,  # already divided by the tokens of the whole batch
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            check_grad_overflow=False,
            **_sizes_and_offload(settings["zero_optimization"], platform),
        )
        self._algorithm = algorithm
        self._step = DeepSpeedStep(self._zero)
        get_model_config(chunks[0]).finalize_model_grads_func = self._reduce
        wrapped = [ZeroChunk(chunk, self._zero) for chunk in chunks]
        super().__init__(wrapped, [base], make_schedule(base, config, steps), shards_state=True, group=groups.dp_cp)

    def begin_step(self) -> None:
        """Set gradients to zero."""
        self._zero.zero_grad()
        self._zero.set_gradient_accumulation_boundary(False)

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

    def _reduce(self, chunks: Sequence[ZeroChunk], *arguments: Any, **options: Any) -> None:
        """Finalise gradients after all micro-batches: replacement of Megatron's `finalize_model_grads`."""
        for chunk in chunks:
            chunk.gradients_to_megatron()
        finalize_model_grads(list(chunks), *arguments, **options)
        for chunk in chunks:
            chunk.gradients_to_deepspeed()
        self._zero.set_gradient_accumulation_boundary(True)
        self._zero.reduce_gradients(pipeline_parallel=True)

    def make_moments(self) -> None:
        """Implement `RunOptimizer.make_moments`."""
        make_linked_moments(self._zero, self._algorithm)

    def slices(self) -> Iterator[FlatSlice]:
        """Implement `RunOptimizer.slices`."""
        return linked_slices(self._zero, self._algorithm)

    def masters(self, parameters: Sequence[Tensor]) -> Iterator[Master]:
        """Implement `RunOptimizer.masters`."""
        return linked_masters(parameters)


class ZeroChunk(torch.nn.Module):
    """Model chunk with the methods of Megatron's DistributedDataParallel that its schedules call.

    Args:
        module: the chunk.
        zero: DeepSpeed's optimizer, which accumulates the gradients.
    """

    def __init__(self, module: MegatronModule, zero: DeepSpeedZeroOptimizer) -> None:
        super().__init__()
        self.module = module
        self.config = get_model_config(module)
        self.ddp_config = DistributedDataParallelConfig()  # read by finalize_model_grads
        # DeepSpeed accumulates bf16 gradients in this fp32 attribute.
        self._attribute = "grad_accum" if zero.use_grad_accum_attribute else "grad"

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Call the chunk."""
        return self.module(*inputs, **kwargs)

    def gradients_to_megatron(self) -> None:
        """Set `main_grad`, where Megatron expects accumulated gradients, to DeepSpeed's gradients."""
        for parameter in self.module.parameters():
            gradient = getattr(parameter, self._attribute)
            assert gradient is not None, "every parameter takes part in every step"
            parameter.main_grad = gradient

    def gradients_to_deepspeed(self) -> None:
        """Copy `main_grad` back to DeepSpeed's gradients if Megatron replaced the tensor."""
        for parameter in self.module.parameters():
            gradient = getattr(parameter, self._attribute)
            if parameter.main_grad is not gradient:
                gradient.copy_(parameter.main_grad)
            del parameter.main_grad

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Do nothing: DeepSpeed reduces over data-parallel ranks later, and the order of the sums does not matter."""

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor."""
        torch._foreach_mul_([p.main_grad for p in self.module.parameters()], factor)


class _ZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer with few kernel launches for gradient reduction and norm.

    The gradients of a parameter group accumulate in one flat fp32 tensor with the layout of the parameters. One
    reduce-scatter gives each data-parallel rank the sum of its shard. DeepSpeed would concatenate the gradients at the
    end of a step, all-reduce them and copy the rank's shard of each. That takes hundreds of kernels, and the GPU would
    wait for their launches. With an offloaded optimizer, DeepSpeed's implementation is used.
    """

    _flat: Sequence[Tensor] = ()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to zero."""
        super().zero_grad(set_to_none)
        if self.cpu_offload:
            return
        if not self._flat:
            self._flat = [torch.empty_like(flat, dtype=torch.float32) for flat in self.bit16_groups_flat]
        attribute = "grad_accum" if self.use_grad_accum_attribute else "grad"
        for gradients, flat, group in zip(self._flat, self.bit16_groups_flat, self.bit16_groups, strict=True):
            gradients.zero_()
            for parameter in group:
                assert parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                start = parameter.storage_offset() - flat.storage_offset()
                setattr(parameter, attribute, gradients[start : start + parameter.numel()].view_as(parameter))

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Reduce gradients over data-parallel ranks."""
        if self.cpu_offload:
            super().reduce_gradients(pipeline_parallel)
            return
        for number, (gradients, group) in enumerate(zip(self._flat, self.real_dp_process_group, strict=True)):
            partition = self._build_compact_grad_partition_buffer(number)
            dist.reduce_scatter_tensor(partition.flat_partition, gradients, group=group)
            self.averaged_gradients[number] = partition

    def get_grad_norm_direct(self, gradients: Iterable[Tensor], params: Iterable[Any], norm_type: float = 2) -> Tensor:
        """Return the 2-norm of a group's gradient over all ranks; -1 if it is not finite.

        Args:
            gradients: this rank's shard: one tensor per parameter, followed by the padding of the shard.
            params: parameters of which this rank holds elements.
            norm_type: 2; DeepSpeed uses no other value here.
        """
        assert norm_type == 2
        own_gradients = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        counted_gradients = [
            partition
            for partition, parameter in zip(own_gradients, params, strict=False)
            if self._is_counted(parameter)
        ]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if counted_gradients:
            square = torch.stack(torch._foreach_norm(counted_gradients)).double().square().sum()
        dist.all_reduce(square, group=self.dp_process_group)
        self._model_parallel_all_reduce(square, dist.ReduceOp.SUM)
        norm = square.sqrt().float()
        return torch.where(norm.isfinite(), norm, -1.0)

    def _is_counted(self, parameter: Any) -> bool:
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return is_model_parallel_parameter(parameter) or self.model_parallel_rank == 0


def make_linked_moments(zero: DeepSpeedZeroOptimizer, algorithm: Algorithm) -> None:
    """Allocate the moments of all groups before the first update, at stage 1 or 2.

    DeepSpeed links parameters to existing moments only once, after the update of the first group.
    """
    if not zero._hp_optimizer_states_linked:
        make_moments(zero.optimizer, algorithm)
        zero._lazy_init_hp_params_optimizer_state()


def linked_slices(zero: DeepSpeedZeroOptimizer, algorithm: Algorithm) -> Iterator[FlatSlice]:
    """Iterate over the optimizer state that DeepSpeed has linked to its parameters, at stage 1 or 2."""
    for group in zero.bit16_groups:
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                moments = {moment: mapping.get_optim_state_fragment(moment) for moment in algorithm.moments}
                tensors = {"param": mapping.hp_fragment.detach(), **moments}
                yield FlatSlice(parameter, mapping.lp_fragment_address.start, tensors)


def linked_masters(parameters: Iterable[Any]) -> Iterator[Master]:
    """Iterate over the fp32 copies that DeepSpeed has linked to parameters, at stage 1 or 2."""
    for parameter in parameters:
        mapping = parameter._hp_mapping
        if mapping is not None:
            yield Master(parameter, mapping.lp_fragment_address.start, mapping.hp_fragment.detach())


def _count_tied_weights_once(chunks: Sequence[torch.nn.Module]) -> None:
    """Exclude the last stage's copy of a tied embedding from the gradient norm."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, "shared", False):
                parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def _sizes_and_offload(settings: Mapping[str, Any], platform: Platform) -> dict[str, Any]:
    zero = DeepSpeedZeroConfig(**settings)
    offload = zero.offload_optimizer
    if offload is not None and not platform.is_cuda:
        offload = offload.model_copy(update={"pin_memory": False})
    return {
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "offload_optimizer_config": offload,
        "contiguous_gradients": offload is not None,  # offloading copies through one buffer
        "overlap_comm": False,
    }
