"""Slices of a profiler trace, and the attribution of a span of time to the places of the slices that cover it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Part of a step and, for parts of the model, the phase."""

    part: str
    phase: str


Span = tuple[float, float]
"""Begin and end in microseconds."""

Spent = dict[Place, float]
"""Microseconds by place."""


@dataclass(eq=False)
class Slice:
    """Slice of a host thread."""

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
    """Return begin and end of an event of the trace."""
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
    """Yield the spans of a slice that no child covers."""
    at = one.begin
    for child in one.children:
        if child.begin > at:
            yield at, child.begin
        at = max(at, child.end)
    if one.end > at:
        yield at, one.end


def fill(step: Slice, layers: Iterable[Sequence[tuple[Span, Place]]], rest: Place) -> tuple[Spent, list[Span]]:
    """Attribute a step's time to the first layer of spans, the remainder to the next, and the rest to `rest`.

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
    """Attribute free time to the spans that cover it, and of several to the one that begins first.

    Args:
        free: unattributed spans, ascending and disjoint.
        wanted: spans with their places, in any order.
        spent: microseconds by place; added to in place.

    Returns:
        Spans that are still free.
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
            if stop > end:  # it reaches into the next free span
                break
            index += 1
        if at < end:
            left.append((at, end))
    return left


def disjoint(wanted: Sequence[tuple[Span, Place]]) -> list[tuple[Span, Place]]:
    """Sort spans by their begin, and cut each to begin after those before it."""
    found: list[tuple[Span, Place]] = []
    at = float("-inf")
    for (start, stop), place in sorted(wanted):
        if stop > max(start, at):
            found.append(((max(start, at), stop), place))
            at = stop
    return found
