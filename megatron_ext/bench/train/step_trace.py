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
    Place,
    Slice,
    Span,
    Spent,
    descendants,
    fill,
    nest,
    own_spans,
    span_of,
    take,
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


def breakdown_of(plain: dict[str, Any]) -> Breakdown:
    """Return a `Breakdown` from the dictionary into which `asdict` converted it."""
    idle = plain["longest_idle"]
    return Breakdown(**{**plain, "longest_idle": None if idle is None else Idle(**idle)})


def mean(found: Sequence[Breakdown]) -> Breakdown:
    """Return the mean of the breakdowns of one or more steps or ranks."""
    all_communicate = [one.communication for one in found if one.communication is not None]
    syncs = [one.host_syncs for one in found if one.host_syncs is not None]
    places = {place for one in syncs for place in one}
    idle = [one.longest_idle for one in found if one.longest_idle is not None]
    return Breakdown(
        step=fmean(one.step for one in found),
        parts={part: fmean(one.parts[part] for one in found) for part in PARTS},
        phases={part: {p: fmean(one.phases[part][p] for one in found) for p in PHASES} for part in MODEL},
        communication=fmean(all_communicate) if all_communicate else None,
        host_syncs={place: fmean(one.get(place, 0) for one in syncs) for place in sorted(places)} if syncs else None,
        longest_idle=max(idle, key=lambda one: one.seconds, default=None),
    )


def break_down(events: Sequence[Mapping[str, Any]]) -> list[Breakdown]:
    """Return the breakdown of every step in a trace, in order.

    Args:
        events: `traceEvents` of a trace.
    """
    trace = _Trace(events)
    return [trace.of_step(step) for step in trace.steps]


class _Trace:
    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._threads: dict[Any, list[Slice]] = defaultdict(list)
        self._by_correlation: dict[int, Slice] = {}
        self._by_id: dict[int, Slice] = {}
        for event in events:
            if event.get("ph") == "X" and event.get("cat") in _HOST:
                self._add(event)
        for slices in self._threads.values():
            nest(slices)
        self._starts = {tid: [one.begin for one in slices] for tid, slices in self._threads.items()}
        self._forward_of = self._flows(events)
        self._backward: dict[Slice, Place] = {}
        self._resolve_backward()
        self._gpu = [event for event in events if event.get("ph") == "X" and event.get("cat") in _GPU]
        self.steps = [one for slices in self._threads.values() for one in slices if one.name == PREFIX + STEP]
        self.steps.sort(key=lambda one: one.begin)

    def _add(self, event: Mapping[str, Any]) -> None:
        begin, args = float(event["ts"]), event.get("args", {})
        is_range = event["cat"] == "user_annotation"
        one = Slice(begin, begin + float(event["dur"]), event["name"], is_range)
        self._threads[event["tid"]].append(one)
        if event["cat"] in ("cuda_runtime", "cuda_driver"):
            self._by_correlation[args.get("correlation", -1)] = one
        else:
            self._by_id[args.get("External id", -1)] = one

    # --- which part --------------------------------------------------------------------------------------------------

    def _flows(self, events: Sequence[Mapping[str, Any]]) -> dict[Slice, Slice]:
        """Map each backward operation to its forward operation, if it has one."""
        ends: dict[str, dict[Any, Slice]] = {"s": {}, "f": {}}
        for event in events:
            if event.get("cat") == "fwdbwd" and event.get("ph") in ends:
                found = self._innermost(event["tid"], float(event["ts"]))
                if found is not None:
                    ends[event["ph"]][event["id"]] = found
        return {one: ends["s"][name] for name, one in ends["f"].items() if name in ends["s"]}

    def _innermost(self, tid: Any, instant: float) -> Slice | None:
        index = bisect_right(self._starts.get(tid, []), instant) - 1
        if index < 0:
            return None
        return next((one for one in self._threads[tid][index].up() if one.end >= instant), None)

    def _resolve_backward(self) -> None:
        """Assign a part and phase to every backward operation, in order of time."""
        nodes = [
            (one.begin, number, tid, one)
            for number, (tid, slices) in enumerate(self._threads.items())
            for one in slices
            if one.name.startswith(_BACKWARD)
        ]
        last: dict[Any, Place] = {}
        for _, _, tid, node in sorted(nodes, key=lambda entry: entry[:2]):
            forward = next((self._forward_of[one] for one in (node, *node.children) if one in self._forward_of), None)
            if forward is not None:
                last[tid] = Place(self.place(forward).part, BACKWARD)
            self._backward[node] = last.get(tid, Place(OTHER, BACKWARD))

    def place(self, one: Slice) -> Place:
        """Return the part and phase of a slice, from the ranges and backward operations that contain it."""
        for outer in one.up():
            if outer in self._backward:
                return self._backward[outer]
            if outer.is_range and outer.name.removeprefix(PREFIX) in PARTS:
                again = any(beyond in self._backward for beyond in outer.up())
                return Place(outer.name.removeprefix(PREFIX), RECOMPUTE if again else FORWARD)
        return Place(OTHER, FORWARD)

    def _place_on_host(self, one: Slice) -> Place:
        communicates = any(outer.name.startswith(_COMMUNICATION) for outer in one.up())
        return Place(COMMUNICATION, FORWARD) if communicates else self.place(one)

    def _place_of_kernel(self, event: Mapping[str, Any]) -> Place:
        if _is_communication(event["name"]):
            return Place(COMMUNICATION, FORWARD)
        args = event.get("args", {})
        callers = self._by_correlation.get(args.get("correlation")), self._by_id.get(args.get("External id"))
        places = [self.place(one) for one in callers if one is not None]
        found = next((place for place in places if place.part != OTHER), Place(OTHER, FORWARD))
        is_input = found.part == OTHER and event["name"].startswith("Memcpy HtoD")
        return Place(DATA, FORWARD) if is_input else found

    # --- how long ----------------------------------------------------------------------------------------------------

    def of_step(self, step: Slice) -> Breakdown:
        """Return the breakdown of a step."""
        idle: Idle | None = None
        communication: float | None = None
        if self._gpu:
            spent, free = self._by_kernels(step)
            idle, communication = self._longest_idle(free), self._communication(step)
        else:
            spent = self._by_host(step)
        parts = {part: sum(us for place, us in spent.items() if place.part == part) / 1e6 for part in PARTS}
        phases = {part: {phase: spent.get(Place(part, phase), 0.0) / 1e6 for phase in PHASES} for part in MODEL}
        syncs = self._host_syncs(step) if self._gpu else None
        seconds = (step.end - step.begin) / 1e6
        return Breakdown(
            step=seconds,
            parts=parts,
            phases=phases,
            communication=communication,
            host_syncs=syncs,
            longest_idle=idle,
        )

    def _by_kernels(self, step: Slice) -> tuple[Spent, list[Span]]:
        computed: list[tuple[Span, Place]] = []
        communicated: list[tuple[Span, Place]] = []
        for event in self._gpu:
            place = self._place_of_kernel(event)
            (communicated if place.part == COMMUNICATION else computed).append((span_of(event), place))
        at_data = [
            ((one.begin, one.end), Place(DATA, FORWARD)) for one in descendants(step) if one.name == PREFIX + DATA
        ]
        return fill(step, (computed, communicated, at_data), Place(IDLE, FORWARD))

    def _longest_idle(self, free: Sequence[Span]) -> Idle | None:
        if not free:
            return None
        begin, end = max(free, key=lambda span: span[1] - span[0])
        at: list[tuple[bool, float, Slice]] = []
        for slices in self._threads.values():
            for one in slices:
                own = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in own_spans(one))
                # Ranges do not count: the main thread is always in a range, even while it waits for autograd's thread.
                at.append((not one.is_range and 2 * own >= end - begin, own, one))
        _, spent, host = max(at, key=lambda entry: entry[:2])
        return Idle((end - begin) / 1e6, self._description(host) if spent else "?")

    def _description(self, one: Slice) -> str:
        """Describe a slice of the host by its name, its caller and its part."""
        by = "" if one.parent is None else f" in {one.parent.name.removeprefix(PREFIX)}"
        return f"{one.name.removeprefix(PREFIX)}{by} ({self.place(one).part})"

    def _communication(self, step: Slice) -> float:
        spent: Spent = defaultdict(float)
        found = [span_of(event) for event in self._gpu if _is_communication(event["name"])]
        take([(step.begin, step.end)], [(span, Place(COMMUNICATION, FORWARD)) for span in found], spent)
        return float(sum(spent.values())) / 1e6

    def _by_host(self, step: Slice) -> Spent:
        """Attribute the main thread's time: operations first, then communication of other threads, then Python."""
        worked: list[tuple[Span, Place]] = []
        idle: list[tuple[Span, Place]] = []
        for one in descendants(step):
            place = self._place_on_host(one)
            entries = idle if one.is_range and place.part != COMMUNICATION else worked
            entries += ((span, place) for span in own_spans(one))
        own = set(descendants(step))
        others = (one for slices in self._threads.values() for one in slices if one not in own)
        beside = [
            ((one.begin, one.end), Place(COMMUNICATION, FORWARD))
            for one in others
            if one.name.startswith(_COMMUNICATION)
        ]
        return fill(step, (worked, beside, idle), Place(OTHER, FORWARD))[0]

    def _host_syncs(self, step: Slice) -> dict[str, float]:
        found: Counter[str] = Counter()
        for slices in self._threads.values():
            for one in slices:
                if one.name not in _SYNCS or not step.begin <= one.begin < step.end:
                    continue
                around = [outer.name for outer in one.up()][1:]
                if PREFIX + END in around or _SYNCS.intersection(around):  # a driver call in a runtime call counts once
                    continue
                found[self._description(one)] += 1
        return {name: float(count) for name, count in found.items()}


def _is_communication(kernel: str) -> bool:
    # Includes the peer-to-peer copies and barriers of the transport `CopyEngines`.
    return kernel.startswith(("nccl", "Memcpy PtoP")) or "symmetric_memory::barrier_kernel" in kernel
