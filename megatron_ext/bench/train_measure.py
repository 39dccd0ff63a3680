"""What a training step of one configuration costs: its time, memory and parts, on the ranks that train it."""

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

from megatron_ext.bench.plain_megatron import plain_flops_per_token
from megatron_ext.bench.step_parts import named_parts, part
from megatron_ext.bench.step_trace import END, STEP, Breakdown, break_down, breakdown_of, mean
from megatron_ext.bench.steps import TimedRun
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.parallel.agreement import from_every_rank
from megatron_ext.platform import Platform
from megatron_ext.scratch import scratch_folder
from megatron_ext.training.run import flops_and_peak, model_size
from megatron_ext.training.trainer import StepResult


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much is measured.

    Attributes:
        warm_up: steps before any is timed: kernels are compiled and tuned, Adam's moments made.
        steps: timed.
        profiled: steps after those, whose parts are measured; 0: none.
    """

    warm_up: int
    steps: int
    profiled: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The most that one rank held, bytes; of a GPU what torch's allocator counts, else the process's resident memory.

    Attributes:
        allocated: for tensors, in the timed steps.
        reserved: by the allocator, in the timed steps; None: there is no GPU.
        allocated_before: for tensors, while the model was made and in the steps that were not timed.
    """

    allocated: int
    reserved: int | None
    allocated_before: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one configuration; of all ranks together where nothing else is said.

    Attributes:
        parameters: of the model, by kind; see `ParameterCount`.
        tokens: real tokens a step.
        seconds: of each timed step, until all ranks had ended it.
        losses: of each timed step, nats a token.
        flops_per_token: model FLOPs of forward and backward, as training counts them.
        peak_flops: of all devices, as training counts it; None: not known.
        memory: of the rank that held most, kind by kind.
        breakdown: mean of the profiled steps and ranks; None: nothing was profiled.
        breakdown_by_rank: means of the profiled steps.
        starting: seconds from the start of the processes until all ranks met: importing, process groups, opening data.
        building: seconds after that until the model, its weights and the optimizer were there.
        first_step: seconds of the first step of all, in which kernels are compiled.
    """

    parameters: dict[str, int]
    tokens: int
    seconds: list[float]
    losses: list[float]
    flops_per_token: float
    peak_flops: float | None
    memory: Memory
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
    amount: Amount,
    *,
    plain: bool = False,
) -> Measured:
    """Train for some steps; a collective call.

    Args:
        config: of the run, checked.
        vocabulary: tokens of the model.
        samples: what it is trained on.
        groups: process groups.
        platform: where this runs.
        amount: how many steps.
        plain: whether the model is megatron-core's own.

    Returns:
        The same on every rank.
    """
    starting = max(from_every_rank(time.time() - psutil.Process().create_time()))
    begun = time.perf_counter()
    run = TimedRun(config, vocabulary, groups, platform, samples, plain=plain)
    platform.synchronize()
    building = time.perf_counter() - begun
    warm_up = [run.timed(run.train) for _ in range(amount.warm_up)]
    before = platform.peak_memory_bytes()
    if platform.is_cuda:
        torch.cuda.reset_peak_memory_stats(platform.device)
    results: list[StepResult] = []
    seconds = [run.timed(lambda: results.append(run.train())) for _ in range(amount.steps)]
    memory = [Memory(**one) for one in from_every_rank(asdict(_memory(platform, before)))]
    by_rank = _breakdowns(run, platform, amount.profiled)
    with run.trainer.optimizer.whole():  # weights are counted
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
        memory=_largest(memory),
        breakdown=mean(by_rank) if by_rank else None,
        breakdown_by_rank=by_rank,
        starting=starting,
        building=building,
        first_step=[*warm_up, *seconds][0],
    )


def _memory(platform: Platform, before: int) -> Memory:
    reserved = torch.cuda.max_memory_reserved(platform.device) if platform.is_cuda else None
    return Memory(allocated=platform.peak_memory_bytes(), reserved=reserved, allocated_before=before)


def _largest(of_ranks: list[Memory]) -> Memory:
    reserved = [one.reserved for one in of_ranks if one.reserved is not None]
    return Memory(
        allocated=max(one.allocated for one in of_ranks),
        reserved=max(reserved) if reserved else None,
        allocated_before=max(one.allocated_before for one in of_ranks),
    )


def _breakdowns(run: TimedRun, platform: Platform, profiled: int) -> list[Breakdown]:
    """The mean of the profiled steps on each rank; none if no step is to be profiled, or the profiler sees no GPU."""
    own = [asdict(step) for step in profile_steps(run, platform, profiled)] if profiled else []
    of_ranks = [[breakdown_of(step) for step in steps] for steps in from_every_rank(own)] if profiled else []
    if not all(of_ranks):
        print("the profiler sees no kernels of a GPU: there are no parts of a step", file=sys.stderr)
        return []
    return [mean(steps) for steps in of_ranks]


def profile_steps(run: TimedRun, platform: Platform, steps: int) -> list[Breakdown]:
    """Breakdowns of this rank's next steps; a collective call. One more is made first: the profiler starts slowly.

    Returns:
        None for a GPU whose kernels the profiler does not see, as where CUPTI may not be used.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.is_cuda else [])]
    with scratch_folder("trace") as folder:
        path = folder / "trace.json"
        with ExitStack() as stack:
            stack.enter_context(named_parts(run.trainer))
            profiler = stack.enter_context(profile(activities=activities))
            for _ in range(1 + steps):
                run.timed(lambda: _marked_step(run, platform))
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes(), strict=False)["traceEvents"]
    found = break_down(events)[1:]
    return found if not platform.is_cuda or all(one.host_syncs is not None for one in found) else []


def _marked_step(run: TimedRun, platform: Platform) -> None:
    with part(STEP):
        run.train()
        with part(END):
            platform.synchronize()
