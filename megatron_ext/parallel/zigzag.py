"""Queries of a causal sequence, shared out so that each rank has as many keys to look at as any other.

Of 2 n pieces of the sequence, rank r of n holds pieces 2 r and 2 r + 1, and works on pieces r and 2 n - 1 - r: an early
one, whose queries see few keys, and a late one. As in Llama 3's context parallelism (Grattafiori et al. 2024,
arXiv 2407.21783, section 3.3.2), but for the time of the attention alone: what is around it keeps its part of the
sequence, with whatever looks back in it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.exchange import all_to_all, exchange


def to_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """From a rank's part of the sequence to the two pieces that it works on, the early one first.

    Args:
        x_tbnw: [t, b, n, w], t even.
        group: rank r holds part r.

    Returns:
        [t, b, n, w]. The gradient takes the way back.
    """
    return exchange(x_tbnw, _to_zigzag, _from_zigzag, group)


def from_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of `to_zigzag`."""
    return exchange(x_tbnw, _from_zigzag, _to_zigzag, group)


def zigzag_pieces(group: ProcessGroup) -> tuple[int, int]:
    """Which of the 2 n pieces this rank works on."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def _to_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    sent, order = _sent(len(x_tbnw), group)
    # The early piece comes from a lower rank than the late one, or from the same.
    return all_to_all(_in_order(x_tbnw, order), group, sent, _received(len(x_tbnw), group))


def _from_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    received, order = _sent(len(x_tbnw), group)
    return _in_order(all_to_all(x_tbnw, group, _received(len(x_tbnw), group), received), order)


def _sent(num_rows: int, group: ProcessGroup) -> tuple[list[int], list[int]]:
    """How many rows of its part a rank sends to each other for the zigzag, and its two pieces in the ranks' order."""
    size, held = group.size(), (2 * group.rank(), 2 * group.rank() + 1)
    workers = [min(piece, 2 * size - 1 - piece) for piece in held]
    return _count(workers, num_rows // 2, size), [0, 1] if workers[0] <= workers[1] else [1, 0]


def _received(num_rows: int, group: ProcessGroup) -> list[int]:
    return _count([piece // 2 for piece in zigzag_pieces(group)], num_rows // 2, group.size())


def _count(ranks: list[int], rows: int, size: int) -> list[int]:
    return [rows * ranks.count(rank) for rank in range(size)]


def _in_order(x_tbnw: Tensor, order: list[int]) -> Tensor:
    """The two halves, in an order that is its own inverse."""
    return x_tbnw if order == [0, 1] else torch.cat(x_tbnw.chunk(2)[::-1])
