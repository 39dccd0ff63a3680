"""Memory, step time and communication of a configuration on a number of GPUs, and search for better layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from megatron_ext.config.derive import derive
from megatron_ext.config.layout import layout_of
from megatron_ext.config.rules import check
from megatron_ext.config.rules.nodes import check_nodes
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.traits import Mixers
from megatron_ext.planning.counts import process_pool
from megatron_ext.planning.gpus import GPUS, Gpu
from megatron_ext.planning.layouts import candidate_layouts, use_copy_engines
from megatron_ext.planning.memory import MemoryByPurpose, peak_memory
from megatron_ext.planning.step_time import HEAD_EXCHANGE, StepTime, step_time
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.planning.dry_step import Footprint
    from megatron_ext.planning.shards import Shard

BuildFootprint = Callable[[RunConfig, int, int, int], "Footprint"]
BuildShards = Callable[[RunConfig, int, int, Sequence[int]], "list[Shard]"]


COPY_ENGINE_ROUNDS = 2
"""Preferred number of rounds in which copy engines exchange heads, a group of heads at a time, if the configuration
allows this number. More rounds do not shorten the step (docs/benchmarks/training.md).
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine to plan for.

    Attributes:
        gpu: kind of GPU, the same on all nodes.
        nodes: number of nodes.
        per_node: GPUs per node.
    """

    gpu: Gpu
    nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        """Number of ranks, one per GPU."""
        return self.nodes * self.per_node


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """Planned layout.

    Attributes:
        config: whole configuration.
        replicas: data-parallel size.
        micro_batches: number of micro-batches per step and replica.
        memory: memory of one rank of each planned pipeline stage; empty if the layout is invalid.
        time: estimated time of a step; None if there is no estimate.
        untimed_reason: reason why `time` is None although the layout was planned.
        rejection: reason why the layout is invalid or does not fit in GPU memory; None if it fits.
    """

    config: RunConfig
    replicas: int
    micro_batches: int
    memory: tuple[MemoryByPurpose, ...] = ()
    time: StepTime | None = None
    untimed_reason: str | None = None
    rejection: str | None = None

    @property
    def largest_memory(self) -> MemoryByPurpose:
        """Memory of the planned rank with the largest total."""
        return max(self.memory, key=lambda memory: memory.total)


def plan(config: RunConfig, vocab_size: int, machine: Machine, mixers: Mixers) -> PlannedLayout:
    """Plan a configuration without changing its layout.

    Raises:
        UserError: the configuration cannot be trained on this machine.
    """
    check(config, machine.world_size, mixers)
    check_nodes(config, machine.world_size, machine.per_node)
    _check_fp8(config, machine.gpu)
    config = derive(config)
    ranks = _first_rank_of_each_stage(config, machine.world_size)
    with process_pool(len(ranks)) as pool:
        footprints = [pool.submit(_footprint, config, vocab_size, machine.world_size, rank) for rank in ranks]
        return _plan_layout(config, [footprint.result() for footprint in footprints], machine)


def search(
    config: RunConfig,
    vocab_size: int,
    machine: Machine,
    mixers: Mixers,
    report_progress: Callable[[str], None] = lambda _: None,
) -> list[PlannedLayout]:
    """Plan all layouts of a configuration. Return them sorted by speed, all that fit before the others.

    If the configured context transport is NCCL, each layout that fits and exchanges heads is also planned with copy
    engines as transport, if the rules allow copy engines for that layout.

    Args:
        config: configuration of the run. Its layout, micro-batch size and recomputation are replaced.
        vocab_size: vocabulary size of the tokenizer.
        machine: to plan for.
        mixers: registered mixers.
        report_progress: called with a line that reports progress after each planned layout.
    """
    _check_fp8(config, machine.gpu)
    layouts: list[PlannedLayout] = []
    pending = []
    with process_pool() as pool:
        for alternatives in candidate_layouts(config, machine.world_size, machine.per_node):
            rejected = _rejected_by_rules(alternatives[0], machine, mixers)
            if rejected is None:
                rounds = _copy_engine_rounds(alternatives[0], machine, mixers)
                pending.append(pool.submit(_plan_until_one_fits, alternatives, rounds, vocab_size, machine))
            else:
                layouts.append(rejected)
        for number, planned in enumerate(pending, 1):
            layouts += planned.result()
            report_progress(f"{number} of {len(pending)} layouts")
    return sorted(layouts, key=_sort_key)


def shards(config: RunConfig, vocab_size: int, world_size: int) -> Iterator[Shard]:
    """Build the model shard of each rank of a checked configuration and yield a description of each, in rank order."""
    with process_pool() as pool:
        size = -(-world_size // 16)
        blocks = [range(first, min(first + size, world_size)) for first in range(0, world_size, size)]
        pending = [pool.submit(_shards, derive(config), vocab_size, world_size, block) for block in blocks]
        for block in pending:
            yield from block.result()


def _copy_engine_rounds(config: RunConfig, machine: Machine, mixers: Mixers) -> int | None:
    """Return the number of rounds in which copy engines can replace NCCL in the head exchange; None if they cannot."""
    if config.parallel.context == 1 or config.parallel.context_transport != "nccl":
        return None
    valid_rounds = (
        n for n in (COPY_ENGINE_ROUNDS, 1) if not _rejected_by_rules(use_copy_engines(config, n), machine, mixers)
    )
    return next(valid_rounds, None)


def _plan_until_one_fits(
    alternatives: Sequence[RunConfig], copy_engine_rounds: int | None, vocab_size: int, machine: Machine
) -> list[PlannedLayout]:
    """Plan configurations in order until one fits.

    If the one that fits exchanges heads and `copy_engine_rounds` is given, also plan it with copy engines as transport.

    Args:
        alternatives: configurations that differ only in recomputation, the fastest first.
        copy_engine_rounds: number of rounds of a head exchange by copy engines; None: do not plan copy engines.
        vocab_size: vocabulary size of the tokenizer.
        machine: to plan for.
    """
    layouts: list[PlannedLayout] = []
    for config in map(derive, alternatives):
        try:
            footprints = _end_stage_footprints(config, vocab_size, machine)
        except UserError as error:
            layouts.append(_rejected_layout(config, machine, error))  # the reason does not depend on recomputation
            break
        layouts.append(_plan_layout(config, footprints, machine))
        if layouts[-1].rejection is None:
            calls = {message.call for footprint in footprints for message in footprint.ledger.messages}
            if copy_engine_rounds is not None and HEAD_EXCHANGE in calls:
                with_copy_engines = use_copy_engines(config, copy_engine_rounds)
                footprints = _end_stage_footprints(with_copy_engines, vocab_size, machine)
                layouts.append(_plan_layout(with_copy_engines, footprints, machine))
            break
    return layouts


def _end_stage_footprints(config: RunConfig, vocab_size: int, machine: Machine) -> list[Footprint]:
    ranks = _first_and_last(_first_rank_of_each_stage(config, machine.world_size))
    return [_footprint(config, vocab_size, machine.world_size, rank) for rank in ranks]


def _check_fp8(config: RunConfig, gpu: Gpu) -> None:
    """Reject FP8 training on a kind of GPU without FP8 matrix products."""
    if config.training.fp8 != "none" and not gpu.has_8_bits:
        problem = f"{config.training.fp8}, but {gpu.name.upper()} GPUs do not support FP8"
        kinds = ", ".join(kind.name for kind in GPUS.values() if kind.has_8_bits)
        raise UserError("training.fp8", problem, f"plan with training.fp8=none, or choose --gpu from {kinds}")


def _first_rank_of_each_stage(config: RunConfig, world_size: int) -> list[int]:
    """Return the first rank of each pipeline stage. Ranks of a stage are consecutive."""
    stages = config.parallel.pipeline
    return [stage * (world_size // stages) for stage in range(stages)]


def _first_and_last(ranks: Sequence[int]) -> list[int]:
    """Return the first and the last of the stages' ranks. The first or last stage needs most memory and time."""
    return [*ranks[:1], *ranks[1:][-1:]]


def _footprint(config: RunConfig, vocab_size: int, world_size: int, rank: int) -> Footprint:
    # Resolved by name, so that only the worker process imports torch.
    build_footprint: BuildFootprint = resolve_name("megatron_ext.planning.dry_step:footprint")
    return build_footprint(config, vocab_size, world_size, rank)


def _shards(config: RunConfig, vocab_size: int, world_size: int, ranks: Sequence[int]) -> list[Shard]:
    # Resolved by name, so that only the worker process imports torch.
    build_shards: BuildShards = resolve_name("megatron_ext.planning.shards:build_shards")
    return build_shards(config, vocab_size, world_size, ranks)


def _plan_layout(config: RunConfig, footprints: Sequence[Footprint], machine: Machine) -> PlannedLayout:
    layout = layout_of(config, machine.world_size)
    memory = tuple(peak_memory(config, footprint) for footprint in footprints)
    planned = PlannedLayout(
        config=config,
        replicas=layout.data_parallel_size,
        micro_batches=layout.num_micro_batches,
        memory=memory,
    )
    if not planned.largest_memory.fits(machine.gpu):
        planned = replace(planned, rejection=planned.largest_memory.describe_excess(machine.gpu))
    if config.training.precision != "bf16":
        return replace(planned, untimed_reason=f"rates were measured in bf16, not in {config.training.precision}")
    time = step_time(config, footprints, machine.gpu, machine.world_size, machine.per_node)
    return replace(planned, time=time)


def _rejected_by_rules(config: RunConfig, machine: Machine, mixers: Mixers) -> PlannedLayout | None:
    """Return the layout with its error if it breaks a rule, else None."""
    try:
        check(config, machine.world_size, mixers)
        check_nodes(config, machine.world_size, machine.per_node)
    except UserError as error:
        return _rejected_layout(config, machine, error)
    return None


def _rejected_layout(config: RunConfig, machine: Machine, error: UserError) -> PlannedLayout:
    layout = layout_of(config, machine.world_size)
    replicas, micro_batches = layout.data_parallel_size, layout.num_micro_batches
    return PlannedLayout(config=config, replicas=replicas, micro_batches=micro_batches, rejection=str(error))


def _sort_key(planned: PlannedLayout) -> tuple[bool, bool, float]:
    """Sort key: layouts that fit by speed, then layouts that do not fit by memory, then invalid layouts."""
    speed = planned.time.tokens_per_second if planned.time else 0.0
    if planned.rejection is None:
        return False, False, -speed
    return True, not planned.memory, planned.largest_memory.total if planned.memory else 0.0
