"""Measurement of training steps of one configuration on its ranks: time, memory and parts."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import psutil
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.profiler import ProfilerActivity, profile

from megatron_ext.bench.steps import TimedRun
from megatron_ext.bench.train.plain_megatron import plain_flops_per_token
from megatron_ext.bench.train.profiler_ranges import profiler_range, record_parts
from megatron_ext.bench.train.step_trace import END, STEP, Breakdown, break_down, breakdown_from_dict, mean_breakdown
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.parallel.agreement import gather_objects
from megatron_ext.platform.device import Platform
from megatron_ext.training.model_size import flops_and_peak, model_size
from megatron_ext.training.trainer import StepResult
from megatron_ext.utils.temp_dirs import scratch_folder


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Numbers of steps to run.

    Attributes:
        warm_up: number of untimed steps at the start, in which kernels are compiled and tuned, and Adam's moments are
            created.
        steps: number of timed steps.
        profiled: number of steps under the profiler after the timed steps; 0: no profile.
    """

    warm_up: int
    steps: int
    profiled: int


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory of one rank in bytes: torch's allocator on a GPU, else the resident memory of the process.

    Attributes:
        allocated: by tensors, during the timed steps.
        reserved: by the allocator, during the timed steps; None: there is no GPU.
        allocated_before: by tensors, during model construction and untimed steps.
    """

    allocated: int
    reserved: int | None
    allocated_before: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a configuration, over all ranks unless stated otherwise.

    Attributes:
        parameters: of the model, by kind; see `ParameterCount`.
        tokens: per step, without padding.
        seconds: of each timed step, until all ranks had finished it.
        losses: of each timed step, in nats per token.
        flops_per_token: model FLOPs of forward and backward pass, as training counts them.
        peak_flops: of all devices, as training counts them; None: unknown.
        memory: maximum over ranks, separately for each kind.
        breakdown: mean over profiled steps and ranks; None: nothing was profiled.
        breakdown_by_rank: mean over the profiled steps of each rank.
        starting: seconds from process start until all ranks had met: imports, process groups, opening of data.
        building: seconds from then until the model, its weights and the optimizer were ready.
        first_step: seconds of the very first step, which includes compilation.
    """

    parameters: dict[str, int]
    tokens: int
    seconds: list[float]
    losses: list[float]
    flops_per_token: float
    peak_flops: float | None
    memory: PeakMemory
    breakdown: Breakdown | None
    breakdown_by_rank: list[Breakdown]
    starting: float
    building: float
    first_step: float


def measure(
    config: RunConfig,
    vocabulary: int,
    samples: TrainingSamples,
    groups: ProcessGroupCollection,
    platform: Platform,
    step_counts: StepCounts,
    *,
    plain: bool = False,
) -> Measured:
    """Train for some steps and measure them; a collective call.

    Args:
        config: checked configuration of the run.
        vocabulary: vocabulary size of the model.
        samples: training samples.
        groups: process groups.
        platform: platform of this process.
        step_counts: numbers of warm-up, timed and profiled steps.
        plain: True if megatron-core alone builds the model.

    Returns:
        Measurements, the same on every rank.
    """
    starting = max(gather_objects(time.time() - psutil.Process().create_time()))
    started = time.perf_counter()
    run = TimedRun(config, vocabulary, groups, platform, samples, plain=plain)
    platform.synchronize()
    building = time.perf_counter() - started
    warm_up = [run.time_call(run.train) for _ in range(step_counts.warm_up)]
    before = platform.peak_memory_bytes()
    if platform.is_cuda:
        torch.cuda.reset_peak_memory_stats(platform.device)
    results: list[StepResult] = []
    seconds = [run.time_call(lambda: results.append(run.train())) for _ in range(step_counts.steps)]
    memory = [PeakMemory(**fields) for fields in gather_objects(asdict(_memory(platform, before)))]
    by_rank = _breakdowns(run, platform, step_counts.profiled)
    with run.trainer.optimizer.gathered_parameters():  # the parameters are counted, so they must be gathered
        flops, peak = flops_and_peak(config, run.shape, run.trainer, run.samples)
        if plain:
            flops = plain_flops_per_token(run.shape, run.trainer, config.data.seq_length)
        parameters = asdict(model_size(run.trainer))
    return Measured(
        parameters=parameters,
        tokens=results[-1].tokens,
        seconds=seconds,
        losses=[result.loss for result in results],
        flops_per_token=flops,
        peak_flops=peak,
        memory=_max_memory(memory),
        breakdown=mean_breakdown(by_rank) if by_rank else None,
        breakdown_by_rank=by_rank,
        starting=starting,
        building=building,
        first_step=[*warm_up, *seconds][0],
    )


def _memory(platform: Platform, before: int) -> PeakMemory:
    reserved = torch.cuda.max_memory_reserved(platform.device) if platform.is_cuda else None
    return PeakMemory(allocated=platform.peak_memory_bytes(), reserved=reserved, allocated_before=before)


def _max_memory(by_rank: list[PeakMemory]) -> PeakMemory:
    reserved = [memory.reserved for memory in by_rank if memory.reserved is not None]
    return PeakMemory(
        allocated=max(memory.allocated for memory in by_rank),
        reserved=max(reserved) if reserved else None,
        allocated_before=max(memory.allocated_before for memory in by_rank),
    )


def _breakdowns(run: TimedRun, platform: Platform, profiled: int) -> list[Breakdown]:
    """Return each rank's mean over the profiled steps; empty if there are none or the profiler sees no GPU kernels."""
    own_steps = [asdict(step) for step in profile_steps(run, platform, profiled)] if profiled else []
    by_rank = [[breakdown_from_dict(step) for step in steps] for steps in gather_objects(own_steps)] if profiled else []
    if not all(by_rank):
        print("the profiler recorded no GPU kernels, so there is no breakdown of a step", file=sys.stderr)
        return []
    return [mean_breakdown(steps) for steps in by_rank]


def profile_steps(run: TimedRun, platform: Platform, steps: int) -> list[Breakdown]:
    """Profile this rank's next steps and return their breakdowns; a collective call.

    A first step is profiled and discarded, because the profiler starts slowly.

    Returns:
        Breakdowns by step; empty if the profiler records no GPU kernels, e.g. if CUPTI is not permitted.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.is_cuda else [])]
    with scratch_folder("trace") as folder:
        path = folder / "trace.json"
        with ExitStack() as stack:
            stack.enter_context(record_parts(run.trainer))
            profiler = stack.enter_context(profile(activities=activities))
            for _ in range(1 + steps):
                run.time_call(lambda: _profiled_step(run, platform))
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes(), strict=False)["traceEvents"]
    breakdowns = break_down(events)[1:]
    has_kernels = all(breakdown.host_syncs is not None for breakdown in breakdowns)
    return breakdowns if has_kernels or not platform.is_cuda else []


def _profiled_step(run: TimedRun, platform: Platform) -> None:
    with profiler_range(STEP):
        run.train()
        with profiler_range(END):
            platform.synchronize()
