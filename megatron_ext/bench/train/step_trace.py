"""Breakdown of a training step's time from a profiler trace: every instant is attributed to one part.

The trace comes from torch.profiler, in Chrome's format. It has slices (`X`) of host threads and GPU streams, and flows
(`s` to `f`) from a forward operation to the backward operation that autograd derived from it. A range whose name begins
with `PREFIX` names the part that the host works on (see `step_parts`).

An operation belongs to the part of the innermost range that contains it. A backward operation belongs to the part of
its forward operation. A backward operation without a forward operation, such as the accumulation of a weight's
gradient, belongs to the part of the preceding backward operation. Recomputation has its own ranges inside a backward
operation.

With a GPU, an instant is attributed to the part of the kernel that runs. If several kernels run, the kernel that began
first counts. An instant is attributed to communication if only communication runs. Otherwise the GPU is idle, and the
instant is attributed to data loading if the host is loading data. Without a GPU, an instant is attributed to the part
that the host's main thread works on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_ext.bench.train.trace_slices import (
    Attribution,
    PartPhase,
    Slice,
    Span,
    attribute_layer,
    attribute_step,
    descendants,
    exclusive_spans,
    link_parents,
    span_of,
)
from megatron_ext.model.step_parts import BACKWARD, COMMUNICATION, FORWARD, MODEL, OPTIMIZER

PREFIX = "selectron: "
STEP, END = "step", "end of the step"
"""Names of the range around a whole step, and of the range inside it around the final wait for the GPU."""

DATA, OTHER, IDLE = "data", "other", "GPU idle"
PARTS = (*MODEL, COMMUNICATION, OPTIMIZER, DATA, OTHER, IDLE)

RECOMPUTE = "recompute"
PHASES = (FORWARD, RECOMPUTE, BACKWARD)

_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_BACKWARD = "autograd::engine::evaluate_function"
_COMMUNICATION = ("c10d::", "gloo:", "nccl:")
_SYNCS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "cuMemcpyDtoH_v2",
}
"""Calls in which the host waits for the GPU."""


@dataclass(frozen=True)
class Idle:
    """Interval in which a GPU was idle.

    Attributes:
        seconds: length of the interval.
        host: operation of a host thread that covers most of the interval, and the operation's part.
    """

    seconds: float
    host: str


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Breakdown of a step's time.

    Attributes:
        step: seconds of the step under the profiler, which slows the step down.
        parts: seconds by part; their sum is `step`.
        phases: seconds by part of the model and phase; as in `parts`, communication is not included.
        communication: seconds in which communication ran, overlapped or not; None: unknown.
        host_syncs: number of times that the host waited for the GPU before the step's end, by location; None: there is
            no GPU.
        longest_idle: longest single interval in which the GPU was idle, over all steps; None: there is no GPU, or it
            was never idle.
    """

    step: float
    parts: dict[str, float]
    phases: dict[str, dict[str, float]]
    communication: float | None
    host_syncs: dict[str, float] | None
    longest_idle: Idle | None


def breakdown_from_dict(fields: dict[str, Any]) -> Breakdown:
    """Return a `Breakdown` from the dictionary into which `asdict` converted it."""
    idle = fields["longest_idle"]
    return Breakdown(**{**fields, "longest_idle": None if idle is None else Idle(**idle)})


def mean_breakdown(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Return the mean of the breakdowns of one or more steps or ranks."""
    communication = [breakdown.communication for breakdown in breakdowns if breakdown.communication is not None]
    syncs = [breakdown.host_syncs for breakdown in breakdowns if breakdown.host_syncs is not None]
    locations = {location for counts in syncs for location in counts}
    mean_syncs = {name: fmean(counts.get(name, 0) for counts in syncs) for name in sorted(locations)} if syncs else None
    idle = [breakdown.longest_idle for breakdown in breakdowns if breakdown.longest_idle is not None]
    return Breakdown(
        step=fmean(breakdown.step for breakdown in breakdowns),
        parts={part: fmean(breakdown.parts[part] for breakdown in breakdowns) for part in PARTS},
        phases={
            part: {p: fmean(breakdown.phases[part][p] for breakdown in breakdowns) for p in PHASES} for part in MODEL
        },
        communication=fmean(communication) if communication else None,
        host_syncs=mean_syncs,
        longest_idle=max(idle, key=lambda interval: interval.seconds, default=None),
    )


def break_down(events: Sequence[Mapping[str, Any]]) -> list[Breakdown]:
    """Return the breakdown of every step in a trace, in order.

    Args:
        events: `traceEvents` of a trace.
    """
    trace = _Trace(events)
    return [trace.break_down_step(step) for step in trace.steps]


class _Trace:
    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._threads: dict[Any, list[Slice]] = defaultdict(list)
        self._by_correlation: dict[int, Slice] = {}
        self._by_id: dict[int, Slice] = {}
        for event in events:
            if event.get("ph") == "X" and event.get("cat") in _HOST:
                self._add(event)
        for slices in self._threads.values():
            link_parents(slices)
        self._starts = {tid: [slice_.begin for slice_ in slices] for tid, slices in self._threads.items()}
        self._forward = self._link_forward(events)
        self._backward: dict[Slice, PartPhase] = {}
        self._resolve_backward()
        self._gpu_events = [event for event in events if event.get("ph") == "X" and event.get("cat") in _GPU]
        self.steps = [slice_ for slices in self._threads.values() for slice_ in slices if slice_.name == PREFIX + STEP]
        self.steps.sort(key=lambda slice_: slice_.begin)

    def _add(self, event: Mapping[str, Any]) -> None:
        begin, args = float(event["ts"]), event.get("args", {})
        is_range = event["cat"] == "user_annotation"
        slice_ = Slice(begin, begin + float(event["dur"]), event["name"], is_range)
        self._threads[event["tid"]].append(slice_)
        if event["cat"] in ("cuda_runtime", "cuda_driver"):
            self._by_correlation[args.get("correlation", -1)] = slice_
        else:
            self._by_id[args.get("External id", -1)] = slice_

    # --- parts and phases ---------------------------------------------------------------------------------------------

    def _link_forward(self, events: Sequence[Mapping[str, Any]]) -> dict[Slice, Slice]:
        """Map each backward operation to its forward operation, if it has one."""
        ends: dict[str, dict[Any, Slice]] = {"s": {}, "f": {}}
        for event in events:
            if event.get("cat") == "fwdbwd" and event.get("ph") in ends:
                found = self._innermost(event["tid"], float(event["ts"]))
                if found is not None:
                    ends[event["ph"]][event["id"]] = found
        return {slice_: ends["s"][name] for name, slice_ in ends["f"].items() if name in ends["s"]}

    def _innermost(self, tid: Any, instant: float) -> Slice | None:
        index = bisect_right(self._starts.get(tid, []), instant) - 1
        if index < 0:
            return None
        return next((slice_ for slice_ in self._threads[tid][index].ancestors() if slice_.end >= instant), None)

    def _resolve_backward(self) -> None:
        """Assign a part and phase to every backward operation, in order of time."""
        nodes = [
            (slice_.begin, number, tid, slice_)
            for number, (tid, slices) in enumerate(self._threads.items())
            for slice_ in slices
            if slice_.name.startswith(_BACKWARD)
        ]
        last: dict[Any, PartPhase] = {}
        for _, _, tid, operation in sorted(nodes, key=lambda entry: entry[:2]):
            forward = next(
                (self._forward[slice_] for slice_ in (operation, *operation.children) if slice_ in self._forward), None
            )
            if forward is not None:
                last[tid] = PartPhase(self.part_phase(forward).part, BACKWARD)
            self._backward[operation] = last.get(tid, PartPhase(OTHER, BACKWARD))

    def part_phase(self, slice_: Slice) -> PartPhase:
        """Return the part and phase of a slice, from the ranges and backward operations that contain it."""
        for outer in slice_.ancestors():
            if outer in self._backward:
                return self._backward[outer]
            if outer.is_range and outer.name.removeprefix(PREFIX) in PARTS:
                is_recomputed = any(ancestor in self._backward for ancestor in outer.ancestors())
                return PartPhase(outer.name.removeprefix(PREFIX), RECOMPUTE if is_recomputed else FORWARD)
        return PartPhase(OTHER, FORWARD)

    def _host_part_phase(self, slice_: Slice) -> PartPhase:
        communicates = any(outer.name.startswith(_COMMUNICATION) for outer in slice_.ancestors())
        return PartPhase(COMMUNICATION, FORWARD) if communicates else self.part_phase(slice_)

    def _kernel_part_phase(self, event: Mapping[str, Any]) -> PartPhase:
        if _is_communication(event["name"]):
            return PartPhase(COMMUNICATION, FORWARD)
        args = event.get("args", {})
        callers = self._by_correlation.get(args.get("correlation")), self._by_id.get(args.get("External id"))
        candidates = [self.part_phase(slice_) for slice_ in callers if slice_ is not None]
        found = next((part_phase for part_phase in candidates if part_phase.part != OTHER), PartPhase(OTHER, FORWARD))
        is_input = found.part == OTHER and event["name"].startswith("Memcpy HtoD")
        return PartPhase(DATA, FORWARD) if is_input else found

    # --- durations ----------------------------------------------------------------------------------------------------

    def break_down_step(self, step: Slice) -> Breakdown:
        """Return the breakdown of a step."""
        idle: Idle | None = None
        communication: float | None = None
        if self._gpu_events:
            attributed, unattributed = self._attribute_kernels(step)
            idle, communication = self._longest_idle(unattributed), self._communication(step)
        else:
            attributed = self._attribute_host(step)
        parts = {
            part: sum(us for part_phase, us in attributed.items() if part_phase.part == part) / 1e6 for part in PARTS
        }
        phases = {
            part: {phase: attributed.get(PartPhase(part, phase), 0.0) / 1e6 for phase in PHASES} for part in MODEL
        }
        syncs = self._host_syncs(step) if self._gpu_events else None
        seconds = (step.end - step.begin) / 1e6
        return Breakdown(
            step=seconds,
            parts=parts,
            phases=phases,
            communication=communication,
            host_syncs=syncs,
            longest_idle=idle,
        )

    def _attribute_kernels(self, step: Slice) -> tuple[Attribution, list[Span]]:
        computed: list[tuple[Span, PartPhase]] = []
        communicated: list[tuple[Span, PartPhase]] = []
        for event in self._gpu_events:
            part_phase = self._kernel_part_phase(event)
            (communicated if part_phase.part == COMMUNICATION else computed).append((span_of(event), part_phase))
        loading = [
            ((slice_.begin, slice_.end), PartPhase(DATA, FORWARD))
            for slice_ in descendants(step)
            if slice_.name == PREFIX + DATA
        ]
        return attribute_step(step, (computed, communicated, loading), PartPhase(IDLE, FORWARD))

    def _longest_idle(self, unattributed: Sequence[Span]) -> Idle | None:
        if not unattributed:
            return None
        begin, end = max(unattributed, key=lambda span: span[1] - span[0])
        candidates: list[tuple[bool, float, Slice]] = []
        for slices in self._threads.values():
            for slice_ in slices:
                covered = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in exclusive_spans(slice_))
                # Ranges do not count: the main thread is always in a range, even while it waits for autograd's thread.
                candidates.append((not slice_.is_range and 2 * covered >= end - begin, covered, slice_))
        _, longest, host = max(candidates, key=lambda entry: entry[:2])
        return Idle((end - begin) / 1e6, self._describe(host) if longest else "?")

    def _describe(self, slice_: Slice) -> str:
        """Describe a slice of the host by its name, its caller and its part."""
        caller = "" if slice_.parent is None else f" in {slice_.parent.name.removeprefix(PREFIX)}"
        return f"{slice_.name.removeprefix(PREFIX)}{caller} ({self.part_phase(slice_).part})"

    def _communication(self, step: Slice) -> float:
        attributed: Attribution = defaultdict(float)
        found = [span_of(event) for event in self._gpu_events if _is_communication(event["name"])]
        attribute_layer(
            [(step.begin, step.end)], [(span, PartPhase(COMMUNICATION, FORWARD)) for span in found], attributed
        )
        return float(sum(attributed.values())) / 1e6

    def _attribute_host(self, step: Slice) -> Attribution:
        """Attribute the main thread's time: operations first, then communication of other threads, then Python."""
        operations: list[tuple[Span, PartPhase]] = []
        ranges: list[tuple[Span, PartPhase]] = []
        for slice_ in descendants(step):
            part_phase = self._host_part_phase(slice_)
            entries = ranges if slice_.is_range and part_phase.part != COMMUNICATION else operations
            entries += ((span, part_phase) for span in exclusive_spans(slice_))
        in_step = set(descendants(step))
        others = (slice_ for slices in self._threads.values() for slice_ in slices if slice_ not in in_step)
        other_communication = [
            ((slice_.begin, slice_.end), PartPhase(COMMUNICATION, FORWARD))
            for slice_ in others
            if slice_.name.startswith(_COMMUNICATION)
        ]
        return attribute_step(step, (operations, other_communication, ranges), PartPhase(OTHER, FORWARD))[0]

    def _host_syncs(self, step: Slice) -> dict[str, float]:
        found: Counter[str] = Counter()
        for slices in self._threads.values():
            for slice_ in slices:
                if slice_.name not in _SYNCS or not step.begin <= slice_.begin < step.end:
                    continue
                outer_names = [outer.name for outer in slice_.ancestors()][1:]
                # A driver call inside a runtime call counts once.
                if PREFIX + END in outer_names or _SYNCS.intersection(outer_names):
                    continue
                found[self._describe(slice_)] += 1
        return {name: float(count) for name, count in found.items()}


def _is_communication(kernel: str) -> bool:
    # Includes the peer-to-peer copies and barriers of the transport `CopyEngines`.
    return kernel.startswith(("nccl", "Memcpy PtoP")) or "symmetric_memory::barrier_kernel" in kernel
