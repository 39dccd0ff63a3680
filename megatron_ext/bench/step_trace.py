"""Where the time of a training step went, from a profiler's trace: every instant of it is of one part.

A trace is torch.profiler's in Chrome's format: slices (`X`) of the host's threads and of the GPU's streams, and flows
(`s` to `f`) from an operation of the forward pass to the one of the backward pass that autograd made of it. Ranges
whose names begin with `PREFIX` say which part the host is at (see `step_parts`).

An operation is of the innermost range around it. One of the backward pass is of the part that its forward operation is
of; one that has none there, such as the accumulation of a weight's gradient, is of that of the operation before it.
What is computed again for the backward pass is in ranges of its own, within an operation of the backward pass.

On a GPU, an instant belongs to the kernel that runs, of several to the one that began first; to communication where
only that runs; else the GPU idles, which is the data's where the host is at them. Without a GPU it belongs to what the
host's main thread is at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from megatron_ext.parts import BACKWARD, COMMUNICATION, FORWARD, MODEL, OPTIMIZER

PREFIX = "selectron: "
STEP, END = "step", "end of the step"
"""Ranges around a whole step, and within it around the wait for the GPU that ends it."""

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


class Place(NamedTuple):
    """Where in a step: a part, and of one of the model's, the phase."""

    part: str
    phase: str


Span = tuple[float, float]
"""Begin and end, microseconds."""

Spent = dict[Place, float]
"""Microseconds by place."""


@dataclass(eq=False)
class _Slice:
    """What a thread of the host does for a while."""

    begin: float
    end: float
    name: str
    is_range: bool
    parent: _Slice | None = None
    children: list[_Slice] = field(default_factory=list)

    def up(self) -> Iterable[_Slice]:
        """This one and those around it, from within."""
        found: _Slice | None = self
        while found is not None:
            yield found
            found = found.parent


@dataclass(frozen=True)
class Idle:
    """A time in which a GPU did nothing.

    Attributes:
        seconds: it lasted.
        host: what a thread of the host was at for most of it, and which part that is of.
    """

    seconds: float
    host: str


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of a step went.

    Attributes:
        step: seconds, profiled, which takes longer than a step that is not.
        parts: seconds by part; they add up to `step`.
        phases: of the model's parts, by phase; without communication, as `parts` are.
        communication: seconds in which anything was communicated, beside computation or not; None: not known.
        host_syncs: how often the host waited for the GPU before the step's end, by where; None: there is no GPU.
        longest_idle: what of `parts`' idle time was longest at once, in any of the steps; None: there is no GPU, or it
            was never idle.
    """

    step: float
    parts: dict[str, float]
    phases: dict[str, dict[str, float]]
    communication: float | None
    host_syncs: dict[str, float] | None
    longest_idle: Idle | None


def breakdown_of(plain: dict[str, Any]) -> Breakdown:
    """The breakdown whose `asdict` this is."""
    idle = plain["longest_idle"]
    return Breakdown(**{**plain, "longest_idle": None if idle is None else Idle(**idle)})


def mean(found: Sequence[Breakdown]) -> Breakdown:
    """The mean of several steps', or ranks', breakdowns; of at least one."""
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
    """The breakdown of every step in a trace, in their order.

    Args:
        events: `traceEvents`.
    """
    trace = _Trace(events)
    return [trace.of_step(step) for step in trace.steps]


class _Trace:
    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._threads: dict[Any, list[_Slice]] = defaultdict(list)
        self._by_correlation: dict[int, _Slice] = {}
        self._by_id: dict[int, _Slice] = {}
        for event in events:
            if event.get("ph") == "X" and event.get("cat") in _HOST:
                self._add(event)
        for slices in self._threads.values():
            _nest(slices)
        self._starts = {tid: [one.begin for one in slices] for tid, slices in self._threads.items()}
        self._forward_of = self._flows(events)
        self._backward: dict[_Slice, Place] = {}
        self._resolve_backward()
        self._gpu = [event for event in events if event.get("ph") == "X" and event.get("cat") in _GPU]
        self.steps = [one for slices in self._threads.values() for one in slices if one.name == PREFIX + STEP]
        self.steps.sort(key=lambda one: one.begin)

    def _add(self, event: Mapping[str, Any]) -> None:
        begin, args = float(event["ts"]), event.get("args", {})
        is_range = event["cat"] == "user_annotation"
        one = _Slice(begin, begin + float(event["dur"]), event["name"], is_range)
        self._threads[event["tid"]].append(one)
        if event["cat"] in ("cuda_runtime", "cuda_driver"):
            self._by_correlation[args.get("correlation", -1)] = one
        else:
            self._by_id[args.get("External id", -1)] = one

    # --- which part --------------------------------------------------------------------------------------------------

    def _flows(self, events: Sequence[Mapping[str, Any]]) -> dict[_Slice, _Slice]:
        """The operation of the forward pass of each one of the backward pass that has one."""
        ends: dict[str, dict[Any, _Slice]] = {"s": {}, "f": {}}
        for event in events:
            if event.get("cat") == "fwdbwd" and event.get("ph") in ends:
                found = self._innermost(event["tid"], float(event["ts"]))
                if found is not None:
                    ends[event["ph"]][event["id"]] = found
        return {one: ends["s"][name] for name, one in ends["f"].items() if name in ends["s"]}

    def _innermost(self, tid: Any, instant: float) -> _Slice | None:
        index = bisect_right(self._starts.get(tid, []), instant) - 1
        if index < 0:
            return None
        return next((one for one in self._threads[tid][index].up() if one.end >= instant), None)

    def _resolve_backward(self) -> None:
        """Give every operation of the backward pass its place, in the order of time: what is computed again first."""
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

    def place(self, one: _Slice) -> Place:
        """Which part a slice is of, by the ranges and operations of the backward pass around it, and in which phase."""
        for outer in one.up():
            if outer in self._backward:
                return self._backward[outer]
            if outer.is_range and outer.name.removeprefix(PREFIX) in PARTS:
                again = any(beyond in self._backward for beyond in outer.up())
                return Place(outer.name.removeprefix(PREFIX), RECOMPUTE if again else FORWARD)
        return Place(OTHER, FORWARD)

    def _place_on_host(self, one: _Slice) -> Place:
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

    def of_step(self, step: _Slice) -> Breakdown:
        """The breakdown of a step."""
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

    def _by_kernels(self, step: _Slice) -> tuple[Spent, list[Span]]:
        computed: list[tuple[Span, Place]] = []
        communicated: list[tuple[Span, Place]] = []
        for event in self._gpu:
            place = self._place_of_kernel(event)
            (communicated if place.part == COMMUNICATION else computed).append((_span(event), place))
        at_data = [((one.begin, one.end), Place(DATA, FORWARD)) for one in _all(step) if one.name == PREFIX + DATA]
        return _fill(step, (computed, communicated, at_data), Place(IDLE, FORWARD))

    def _longest_idle(self, free: Sequence[Span]) -> Idle | None:
        if not free:
            return None
        begin, end = max(free, key=lambda span: span[1] - span[0])
        at: list[tuple[bool, float, _Slice]] = []
        for slices in self._threads.values():
            for one in slices:
                own = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in _own(one))
                # The main thread is always in a range, also where it only waits for autograd's thread.
                at.append((not one.is_range and 2 * own >= end - begin, own, one))
        _, spent, host = max(at, key=lambda entry: entry[:2])
        return Idle((end - begin) / 1e6, self._said(host) if spent else "?")

    def _said(self, one: _Slice) -> str:
        """What the host was at, by whose call, and which part that is of."""
        by = "" if one.parent is None else f" in {one.parent.name.removeprefix(PREFIX)}"
        return f"{one.name.removeprefix(PREFIX)}{by} ({self.place(one).part})"

    def _communication(self, step: _Slice) -> float:
        spent: Spent = defaultdict(float)
        found = [_span(event) for event in self._gpu if _is_communication(event["name"])]
        _take([(step.begin, step.end)], [(span, Place(COMMUNICATION, FORWARD)) for span in found], spent)
        return float(sum(spent.values())) / 1e6

    def _by_host(self, step: _Slice) -> Spent:
        """What the main thread is at: operations; where it is in none, communication of other threads; else Python."""
        worked: list[tuple[Span, Place]] = []
        idle: list[tuple[Span, Place]] = []
        for one in _all(step):
            place = self._place_on_host(one)
            entries = idle if one.is_range and place.part != COMMUNICATION else worked
            entries += ((span, place) for span in _own(one))
        own = set(_all(step))
        others = (one for slices in self._threads.values() for one in slices if one not in own)
        beside = [
            ((one.begin, one.end), Place(COMMUNICATION, FORWARD))
            for one in others
            if one.name.startswith(_COMMUNICATION)
        ]
        return _fill(step, (worked, beside, idle), Place(OTHER, FORWARD))[0]

    def _host_syncs(self, step: _Slice) -> dict[str, float]:
        found: Counter[str] = Counter()
        for slices in self._threads.values():
            for one in slices:
                if one.name not in _SYNCS or not step.begin <= one.begin < step.end:
                    continue
                around = [outer.name for outer in one.up()][1:]
                if PREFIX + END in around or _SYNCS.intersection(around):  # a driver's call within the runtime's is one
                    continue
                found[self._said(one)] += 1
        return {name: float(count) for name, count in found.items()}


def _is_communication(kernel: str) -> bool:
    # What copy engines fetch, and how ranks meet before and after it (`CopyEngines`), too.
    return kernel.startswith(("nccl", "Memcpy PtoP")) or "symmetric_memory::barrier_kernel" in kernel


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _nest(slices: list[_Slice]) -> None:
    """Sort the slices of a thread, and say of each which one it is in."""
    slices.sort(key=lambda one: (one.begin, -one.end))
    around: list[_Slice] = []
    for one in slices:
        while around and around[-1].end <= one.begin:
            around.pop()
        if around:
            one.parent = around[-1]
            one.parent.children.append(one)
        around.append(one)


def _all(outer: _Slice) -> Iterable[_Slice]:
    """A slice and all within it."""
    left = [outer]
    while left:
        one = left.pop()
        yield one
        left += one.children


def _own(one: _Slice) -> Iterable[Span]:
    """When a slice was in none that is within it."""
    at = one.begin
    for child in one.children:
        if child.begin > at:
            yield at, child.begin
        at = max(at, child.end)
    if one.end > at:
        yield at, one.end


def _fill(step: _Slice, layers: Iterable[Sequence[tuple[Span, Place]]], rest: Place) -> tuple[Spent, list[Span]]:
    """Give a step's time to the first layer, what that leaves to the next one, and what all leave to `rest`.

    Returns:
        What was given, and what all layers left.
    """
    free = [(step.begin, step.end)]
    spent: Spent = defaultdict(float)
    for layer in layers:
        free = _take(free, layer, spent)
    spent[rest] += sum(end - begin for begin, end in free)
    return spent, free


def _take(free: Sequence[Span], wanted: Sequence[tuple[Span, Place]], spent: Spent) -> list[Span]:
    """Give free time to those that want it, of several to the one that begins first.

    Args:
        free: spans that are nobody's, ascending, apart.
        wanted: when, and for what; in any order.
        spent: microseconds, added to.

    Returns:
        What is still free.
    """
    left: list[Span] = []
    claims, index = _apart(wanted), 0
    for begin, end in free:
        at = begin
        while index < len(claims) and claims[index][0][0] < end:
            (start, stop), place = claims[index]
            if stop > at:
                if start > at:
                    left.append((at, start))
                until = min(stop, end)
                spent[place] += until - max(at, start)
                at = until
            if stop > end:  # it reaches into the next free span
                break
            index += 1
        if at < end:
            left.append((at, end))
    return left


def _apart(wanted: Sequence[tuple[Span, Place]]) -> list[tuple[Span, Place]]:
    """Spans in the order of their beginning, each from the end of those before it."""
    found: list[tuple[Span, Place]] = []
    at = float("-inf")
    for (start, stop), place in sorted(wanted):
        if stop > max(start, at):
            found.append(((max(start, at), stop), place))
            at = stop
    return found
