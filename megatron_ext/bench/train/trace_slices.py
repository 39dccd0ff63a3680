"""Slices of a profiler trace, and the attribution of time spans to parts and phases of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Part of a step, and the phase. Only parts of the model have other phases than forward."""

    part: str
    phase: str


Span = tuple[float, float]
"""Begin and end in microseconds."""

Spent = dict[Place, float]
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

    def up(self) -> Iterable[Slice]:
        """Yield this slice and its ancestors, innermost first."""
        found: Slice | None = self
        while found is not None:
            yield found
            found = found.parent


def span_of(event: Mapping[str, Any]) -> Span:
    """Return begin and end of an event of the trace, in microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def nest(slices: list[Slice]) -> None:
    """Sort the slices of a thread, and set parents and children."""
    slices.sort(key=lambda one: (one.begin, -one.end))
    around: list[Slice] = []
    for one in slices:
        while around and around[-1].end <= one.begin:
            around.pop()
        if around:
            one.parent = around[-1]
            one.parent.children.append(one)
        around.append(one)


def descendants(outer: Slice) -> Iterable[Slice]:
    """Yield a slice and all its descendants."""
    left = [outer]
    while left:
        one = left.pop()
        yield one
        left += one.children


def own_spans(one: Slice) -> Iterable[Span]:
    """Yield the spans of a slice that none of its children covers."""
    at = one.begin
    for child in one.children:
        if child.begin > at:
            yield at, child.begin
        at = max(at, child.end)
    if one.end > at:
        yield at, one.end


def fill(step: Slice, layers: Iterable[Sequence[tuple[Span, Place]]], rest: Place) -> tuple[Spent, list[Span]]:
    """Attribute a step's time to layers of spans. A layer only gets the time that no earlier layer covers.

    Args:
        step: slice of the whole step.
        layers: spans with their parts and phases, by layer.
        rest: part and phase of the time that no layer covers.

    Returns:
        Attributed microseconds, and the spans that no layer covers.
    """
    free = [(step.begin, step.end)]
    spent: Spent = defaultdict(float)
    for layer in layers:
        free = take(free, layer, spent)
    spent[rest] += sum(end - begin for begin, end in free)
    return spent, free


def take(free: Sequence[Span], wanted: Sequence[tuple[Span, Place]], spent: Spent) -> list[Span]:
    """Attribute unattributed time to the spans that cover it. Of several such spans, the one that begins first counts.

    Args:
        free: unattributed spans, ascending and disjoint.
        wanted: spans with their parts and phases, in any order.
        spent: microseconds by part and phase; updated in place.

    Returns:
        Spans that are still unattributed.
    """
    left: list[Span] = []
    claims, index = disjoint(wanted), 0
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
            if stop > end:  # the claim may extend into the next free span
                break
            index += 1
        if at < end:
            left.append((at, end))
    return left


def disjoint(wanted: Sequence[tuple[Span, Place]]) -> list[tuple[Span, Place]]:
    """Sort spans by their begin, and shorten each span so that it begins after the preceding spans end."""
    found: list[tuple[Span, Place]] = []
    at = float("-inf")
    for (start, stop), place in sorted(wanted):
        if stop > max(start, at):
            found.append(((max(start, at), stop), place))
            at = stop
    return found
