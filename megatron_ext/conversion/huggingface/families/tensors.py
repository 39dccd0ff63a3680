"""Conversion rules that several families use: renaming, reshaping and reordering of rows.

"Our" tensors belong to a Selectron checkpoint, "their" tensors to a checkpoint of the other library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.conversion.core.family import Rule

if TYPE_CHECKING:
    from torch import Tensor


def rename_rule(ours: str, theirs: str) -> Rule:
    """Return the rule for a tensor that only has another key in the other library."""
    return Rule((ours,), (theirs,), list, list)


def reshape_rule(
    ours: str, theirs: str, to_theirs: Callable[[Tensor], Tensor], to_ours: Callable[[Tensor], Tensor]
) -> Rule:
    """Return the rule for a tensor that has another shape in the other library.

    Args:
        ours: key of our tensor.
        theirs: key of their tensor.
        to_theirs: function from our tensor to theirs.
        to_ours: inverse of `to_theirs`.
    """
    return Rule(
        (ours,),
        (theirs,),
        lambda tensors: [to_theirs(tensor).contiguous() for tensor in tensors],
        lambda tensors: [to_ours(tensor).contiguous() for tensor in tensors],
    )


def flatten_rule(ours: str, theirs: str, head_groups: int) -> Rule:
    """Return the rule between our tensor [head groups, width, ...] and theirs [head groups * width, ...]."""
    return reshape_rule(ours, theirs, lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, (head_groups, -1)))


def split_rows(x: Tensor, head_groups: int, widths: Sequence[int]) -> list[Tensor]:
    """Split the rows of all head groups by kind.

    Args:
        x: [head groups * sum(widths), ...], with the rows of a head group next to each other.
        head_groups: number of head groups.
        widths: number of rows of each kind in a head group.

    Returns:
        For each kind, a tensor [head groups * width, ...].
    """
    return [part.flatten(0, 1) for part in x.unflatten(0, (head_groups, -1)).split(list(widths), 1)]


def interleave_rows(parts: Sequence[Tensor], head_groups: int) -> Tensor:
    """Interleave tensors [head groups * width, ...] head group by head group; the inverse of `split_rows`."""
    import torch

    return torch.cat([part.unflatten(0, (head_groups, -1)) for part in parts], 1).flatten(0, 1)


def split_rows_rule(ours: str, theirs: dict[str, int], head_groups: int) -> Rule:
    """Return the rule for an input projection: our tensor has interleaved head groups, theirs are one tensor per kind.

    Args:
        ours: key of our tensor, [head groups * sum of widths, ...], with the rows of a head group next to each other.
        theirs: number of rows per head group, by key of their tensor, in the order of our rows. Tensors with 0 rows do
            not exist.
        head_groups: number of heads or query groups.
    """
    widths = {name: width for name, width in theirs.items() if width}
    return Rule(
        (ours,),
        tuple(widths),
        lambda tensors: [part.contiguous() for part in split_rows(tensors[0], head_groups, list(widths.values()))],
        lambda tensors: [interleave_rows(tensors, head_groups)],
    )


def reorder_rows_rule(ours: str, theirs: str, head_groups: int, widths: dict[str, int], order: Sequence[str]) -> Rule:
    """Return the rule between our tensor, whose rows are ordered by head group, and theirs, ordered by kind.

    Args:
        ours: key of our tensor, [head groups * sum of widths, ...].
        theirs: key of their tensor, with the same number of rows.
        head_groups: number of heads or query groups.
        widths: number of rows per head group by kind, in the order of our rows.
        order: kinds in the order of their rows.
    """

    def to_theirs(x: Tensor) -> Tensor:
        import torch

        indices = torch.arange(len(x), device=x.device).unflatten(0, (head_groups, -1)).split(list(widths.values()), 1)
        kinds = dict(zip(widths, indices, strict=True))
        return x[torch.cat([kinds[kind].reshape(-1) for kind in order])]  # a single copy

    def to_ours(x: Tensor) -> Tensor:
        kinds = dict(zip(order, x.split([head_groups * widths[kind] for kind in order]), strict=True))
        return interleave_rows([kinds[kind] for kind in widths], head_groups)

    return reshape_rule(ours, theirs, to_theirs, to_ours)


def transform_ours(rule: Rule, to_theirs: Callable[[Tensor], Tensor], to_ours: Callable[[Tensor], Tensor]) -> Rule:
    """Return a rule extended by a transformation of our tensors.

    Args:
        rule: rule for the transformed tensors.
        to_theirs: function from our tensor to the form that `rule` converts.
        to_ours: inverse of `to_theirs`.
    """
    return replace(
        rule,
        to_theirs=lambda tensors: rule.to_theirs([to_theirs(tensor) for tensor in tensors]),
        to_ours=lambda tensors: [to_ours(tensor) for tensor in rule.to_ours(tensors)],
    )


def add_prefixes(rules: Iterable[Rule], ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules with a prefix added to the keys on both sides.

    Args:
        rules: rules with relative keys.
        ours: prefix of our keys.
        theirs: prefix of their keys.
    """
    for rule in rules:
        yield replace(
            rule,
            ours=tuple(f"{ours}{name}" for name in rule.ours),
            theirs=tuple(f"{theirs}{name}" for name in rule.theirs),
            neutral=tuple(f"{theirs}{name}" for name in rule.neutral),
        )
