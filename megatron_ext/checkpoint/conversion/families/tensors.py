"""Rules that families share: tensors under another name, in another shape, rows in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.checkpoint.conversion.family import Rule

if TYPE_CHECKING:
    from torch import Tensor


def renamed(ours: str, theirs: str) -> Rule:
    """The same tensor under another name."""
    return Rule((ours,), (theirs,), list, list)


def reshaped(
    ours: str, theirs: str, to_theirs: Callable[[Tensor], Tensor], to_ours: Callable[[Tensor], Tensor]
) -> Rule:
    """One tensor made from one."""
    return Rule(
        (ours,),
        (theirs,),
        lambda tensors: [to_theirs(tensor).contiguous() for tensor in tensors],
        lambda tensors: [to_ours(tensor).contiguous() for tensor in tensors],
    )


def flattened(ours: str, theirs: str, units: int) -> Rule:
    """Ours [units, width, ...], theirs [units * width, ...]."""
    return reshaped(ours, theirs, lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, (units, -1)))


def apart(x: Tensor, units: int, widths: Sequence[int]) -> list[Tensor]:
    """Rows of all units by what they are.

    Args:
        x: [units * sum(widths), ...], rows of the units one after the other.
        units: how many.
        widths: rows that a unit has of each kind.

    Returns:
        For each kind [units * width, ...].
    """
    return [part.flatten(0, 1) for part in x.unflatten(0, (units, -1)).split(list(widths), 1)]


def together(parts: Sequence[Tensor], units: int) -> Tensor:
    """The inverse of `apart`."""
    import torch

    return torch.cat([part.unflatten(0, (units, -1)) for part in parts], 1).flatten(0, 1)


def rows(ours: str, theirs: dict[str, int], units: int) -> Rule:
    """Rows of our input projection, unit after unit, and theirs, a matrix for each kind.

    Args:
        ours: [units * sum of widths, ...].
        theirs: by name, the rows that a unit has of it, in our order; what has none is left out.
        units: heads or query groups.
    """
    widths = {name: width for name, width in theirs.items() if width}
    return Rule(
        (ours,),
        tuple(widths),
        lambda tensors: [part.contiguous() for part in apart(tensors[0], units, list(widths.values()))],
        lambda tensors: [together(tensors, units)],
    )


def rows_in_order(ours: str, theirs: str, units: int, widths: dict[str, int], order: Sequence[str]) -> Rule:
    """Rows of ours, unit after unit, and theirs, kind after kind in one tensor.

    Args:
        ours: [units * sum of widths, ...].
        theirs: as many rows.
        units: heads or query groups.
        widths: by kind, in our order, rows that a unit has of it.
        order: the kinds in their order.
    """

    def to_theirs(x: Tensor) -> Tensor:
        import torch

        numbers = torch.arange(len(x), device=x.device).unflatten(0, (units, -1)).split(list(widths.values()), 1)
        kinds = dict(zip(widths, numbers, strict=True))
        return x[torch.cat([kinds[kind].reshape(-1) for kind in order])]  # no part of x is held twice

    def to_ours(x: Tensor) -> Tensor:
        kinds = dict(zip(order, x.split([units * widths[kind] for kind in order]), strict=True))
        return together([kinds[kind] for kind in widths], units)

    return reshaped(ours, theirs, to_theirs, to_ours)


def through(rule: Rule, to_theirs: Callable[[Tensor], Tensor], to_ours: Callable[[Tensor], Tensor]) -> Rule:
    """A rule that is given our tensors in another shape.

    Args:
        rule: as it is with that shape.
        to_theirs: gives our tensors that shape.
        to_ours: gives them their own again.
    """
    return replace(
        rule,
        to_theirs=lambda tensors: rule.to_theirs([to_theirs(tensor) for tensor in tensors]),
        to_ours=lambda tensors: [to_ours(tensor) for tensor in rule.to_ours(tensors)],
    )


def under(rules: Iterable[Rule], ours: str, theirs: str) -> Iterator[Rule]:
    """Rules with a prefix before the names on both sides."""
    for rule in rules:
        yield replace(
            rule,
            ours=tuple(f"{ours}{name}" for name in rule.ours),
            theirs=tuple(f"{theirs}{name}" for name in rule.theirs),
            neutral=tuple(f"{theirs}{name}" for name in rule.neutral),
        )
