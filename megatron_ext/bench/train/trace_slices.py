"""Slices of a profiler trace, and the attribution of time spans to parts and phases of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class PartPhase(NamedTuple):
    """Part of a step, and the phase. Only parts of the model have other phases than forward."""

    part: str
    phase: str


Span = tuple[float, float]
"""Begin and end in microseconds."""

Attribution = dict[PartPhase, float]
"""Microseconds by part and phase."""


@dataclass(eq=False)
class Slice:
    """Slice of a host thread: an operation or, if `is_range`, a named range. Times are in microseconds."""

    begin: float
    end: float
    name: str
    is_range: bool
    parent: Slice | None = None
    children: list[Slice] = field(default_factory=list)

    def ancestors(self) -> Iterable[Slice]:
        """Yield this slice and its ancestors, innermost first."""
        found: Slice | None = self
        while found is not None:
            yield found
            found = found.parent


def span_of(event: Mapping[str, Any]) -> Span:
    """Return begin and end of an event of the trace, in microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def link_parents(slices: list[Slice]) -> None:
    """Sort the slices of a thread, and set parents and children."""
    slices.sort(key=lambda slice_: (slice_.begin, -slice_.end))
    open_slices: list[Slice] = []
    for slice_ in slices:
        while open_slices and open_slices[-1].end <= slice_.begin:
            open_slices.pop()
        if open_slices:
            slice_.parent = open_slices[-1]
            slice_.parent.children.append(slice_)
        open_slices.append(slice_)


def descendants(outer: Slice) -> Iterable[Slice]:
    """Yield a slice and all its descendants."""
    remaining = [outer]
    while remaining:
        slice_ = remaining.pop()
        yield slice_
        remaining += slice_.children


def exclusive_spans(slice_: Slice) -> Iterable[Span]:
    """Yield the spans of a slice that none of its children covers."""
    cursor = slice_.begin
    for child in slice_.children:
        if child.begin > cursor:
            yield cursor, child.begin
        cursor = max(cursor, child.end)
    if slice_.end > cursor:
        yield cursor, slice_.end


def attribute_step(
    step: Slice, layers: Iterable[Sequence[tuple[Span, PartPhase]]], default: PartPhase
) -> tuple[Attribution, list[Span]]:
    """Attribute a step's time to layers of spans. A layer only gets the time that no earlier layer covers.

    Args:
        step: slice of the whole step.
        layers: spans with their parts and phases, by layer.
        default: part and phase of the time that no layer covers.

    Returns:
        Attributed microseconds, and the spans that no layer covers.
    """
    unattributed = [(step.begin, step.end)]
    attributed: Attribution = defaultdict(float)
    for layer in layers:
        unattributed = attribute_layer(unattributed, layer, attributed)
    attributed[default] += sum(end - begin for begin, end in unattributed)
    return attributed, unattributed


def attribute_layer(
    unattributed: Sequence[Span], spans: Sequence[tuple[Span, PartPhase]], attributed: Attribution
) -> list[Span]:
    """Attribute unattributed time to the spans that cover it. Of several such spans, the one that begins first counts.

    Args:
        unattributed: unattributed spans, ascending and disjoint.
        spans: spans with their parts and phases, in any order.
        attributed: microseconds by part and phase; updated in place.

    Returns:
        Spans that are still unattributed.
    """
    remaining: list[Span] = []
    claims, index = disjoint(spans), 0
    for begin, end in unattributed:
        cursor = begin
        while index < len(claims) and claims[index][0][0] < end:
            (start, stop), part_phase = claims[index]
            if stop > cursor:
                if start > cursor:
                    remaining.append((cursor, start))
                until = min(stop, end)
                attributed[part_phase] += until - max(cursor, start)
                cursor = until
            if stop > end:  # the claim may extend into the next free span
                break
            index += 1
        if cursor < end:
            remaining.append((cursor, end))
    return remaining


def disjoint(spans: Sequence[tuple[Span, PartPhase]]) -> list[tuple[Span, PartPhase]]:
    """Sort spans by their begin, and shorten each span so that it begins after the preceding spans end."""
    found: list[tuple[Span, PartPhase]] = []
    cursor = float("-inf")
    for (start, stop), part_phase in sorted(spans):
        if stop > max(start, cursor):
            found.append(((max(start, cursor), stop), part_phase))
            cursor = stop
    return found
