"""ZeRO-2 and ZeRO-3: DeepSpeed's engine as the one model chunk of Megatron's schedule without a pipeline.

The engine reduces gradients in every micro-batch's backward pass and gives each data-parallel rank its part; with
ZeRO-3 parameters, too, are shared out, and gathered around their use (Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters, parameter_offload
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.deepspeed_groups import GroupsForDeepSpeed, join_process_group
from megatron_ext.optim.deepspeed_steps import step_if
from megatron_ext.optim.fp32_values import Master
from megatron_ext.optim.parameter_groups import adamw
from megatron_ext.optim.schedule import make_schedule
from megatron_ext.optim.state import MOMENTS, Stretch, make_moments
from megatron_ext.optim.zero1 import linked_masters, linked_stretches, make_linked_moments
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
        if self._shares_parameters:
            self._make_moments_of_shares()
        schedule = make_schedule(base, config, steps)
        super().__init__([EngineChunk(self._engine)], [base], schedule, shares_state=True, group=groups.dp_cp)

    def whole(self) -> AbstractContextManager[None]:
        """Within it every rank holds its model-parallel part of the parameters whole; a collective call."""
        if not self._shares_parameters:
            return nullcontext()
        return GatheredParameters(self._parameters, modifier_rank=0)

    @contextmanager
    def testing(self) -> Iterator[Sequence[torch.nn.Module]]:
        """See `RunOptimizer.testing`; the engine, which counts passes and expects a backward one, has no part in it."""
        with self.whole(), self._without_hooks():
            yield [self._engine.module]

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Within it ZeRO-3 does not gather parameters around their use; it learns their order anew afterwards."""
        if not self._shares_parameters:
            yield
            return
        hooks = self._zero.parameter_offload
        hooks._remove_module_hooks()
        for kept in (hooks.forward_hooks, hooks.backward_hooks):
            kept.clear()
        try:
            yield
        finally:
            parameter_offload.FWD_MODULE_STACK.pop()  # the model, which is put there again
            hooks.setup_zero_stage3_hooks()

    def begin_step(self) -> None:
        """Nothing: the engine's own step leaves gradients at zero."""

    def _finish_step(self, goes_on: Callable[[float], bool]) -> None:
        self.make_moments()
        step_if(self._zero, self._engine.step, goes_on)

    def _count_tokens(self, chunks: Sequence[torch.nn.Module], num_tokens: Tensor, *_: Any, **__: Any) -> None:
        """What Megatron calls when all micro-batches are through: gradients are reduced by then, as averages of sums.

        DeepSpeed divides them by its loss scale on the way to the optimizer, so that is where the tokens go.
        """
        dist.all_reduce(num_tokens, group=self._groups.dp_cp)
        self._zero.loss_scale = float(num_tokens) / self._groups.dp_cp.size()

    def make_moments(self) -> None:
        """Make Adam's moments, if there are none; those of shares are made at the start."""
        if not self._shares_parameters:
            make_linked_moments(self._zero)

    def _make_moments_of_shares(self) -> None:
        """Make Adam's moments for all that ZeRO-3 gave this rank, before there are gradients.

        What lies on a disk (NVMe) is brought from there and back, and gradients would be lost on that way.
        """
        zero = self._zero
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            on_disk = zero._swappable_optimizer_subgroup(number)
            if on_disk:
                zero._optimizer_states_and_gradient_swap_in(number)
            make_moments(zero.optimizer, [flat])  # its groups are empty between steps
            if on_disk:
                zero._optimizer_states_and_gradient_swap_out(number)

    def take(self, stretches: Sequence[Stretch], plain: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for stretch in stretches:
            if self._on_disk(stretch.parameter):
                self._bring_to_disk(stretch)
        super().take(stretches, plain)

    def stretches(self) -> Iterator[Stretch]:
        """Optimizer state as this rank holds it."""
        if not self._shares_parameters:
            yield from linked_stretches(self._zero)
            return
        for parameter in self._parameters:
            share = self._share(parameter)
            if share is not None:
                yield share

    def masters(self, parameters: Sequence[Tensor]) -> Iterator[Master]:
        """See `RunOptimizer.masters`."""
        if not self._shares_parameters:
            yield from linked_masters(parameters)
            return
        for parameter in parameters:
            share = self._share(parameter, ("param",))
            if share is not None:
                yield Master(parameter, share.start, share.tensors["param"])

    def _write_master(self, master: Master, values: Tensor) -> None:
        """See `RunOptimizer._write_master`."""
        super()._write_master(master, values)
        if self._on_disk(master.parameter):
            self._bring_to_disk(Stretch(master.parameter, master.start, {"param": master.values}))

    def _share(self, parameter: Any, kinds: Sequence[str] = ("param", *MOMENTS)) -> Stretch | None:
        """The share of a parameter that ZeRO-3 gave this rank; None where others have all of it.

        Shares are of one size, so the last ones are padded.
        """
        size, numel = parameter.ds_tensor.ds_numel, parameter.ds_numel
        start = dist.get_rank(parameter.ds_process_group) * size
        if start >= numel:
            return None
        length, tensors = min(size, numel - start), {}
        on_disk = self._on_disk(parameter)
        for kind in kinds:
            # DeepSpeed's public functions for this would copy what is offloaded onto the GPU.
            state = None if kind == "param" else kind
            held, _ = self._zero._get_fp32_opt_state_partition(parameter, True, state)
            # From a disk it comes in a buffer that is for the next one, too.
            tensors[kind] = (held.clone() if on_disk else held).detach()[:length]
        return Stretch(parameter, start, tensors)

    def _on_disk(self, parameter: Any) -> bool:
        """Whether DeepSpeed keeps this parameter's optimizer state on a disk."""
        if not self._shares_parameters:
            return False
        group, *_ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return bool(self._zero._swappable_optimizer_subgroup(group))

    def _bring_to_disk(self, stretch: Stretch) -> None:
        parameter: Any = stretch.parameter
        for kind, tensor in stretch.tensors.items():
            padded = tensor.new_zeros(parameter.ds_tensor.ds_numel)
            padded[: len(tensor)] = tensor
            self._zero.set_local_hp_param(padded, parameter, None if kind == "param" else kind)


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
