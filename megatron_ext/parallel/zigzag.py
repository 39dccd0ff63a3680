"""Zigzag load balancing of causal attention: each rank gets queries with equally many visible keys.

Rank r of n has pieces 2r and 2r + 1 of 2n pieces of the sequence, and processes pieces r and 2n - 1 - r. The queries of
the early piece r see few keys, those of the late piece many. Llama 3's context parallelism does the same (Grattafiori
et al. 2024, arXiv 2407.21783, section 3.3.2). Here only the queries of attention are exchanged. All other operations
keep contiguous shards, because some of them access earlier positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.exchange import all_to_all, exchange


def to_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange a rank's sequence shard for the two pieces that the rank processes, the early piece first.

    Args:
        x_tbnw: sequence shard [t, b, n, w], t even.
        group: context-parallel group; rank r has shard r.

    Returns:
        The two pieces, together [t, b, n, w]. The backward pass applies the inverse exchange.
    """
    return exchange(x_tbnw, _to_zigzag, _from_zigzag, group)


def from_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """Apply the inverse of `to_zigzag`."""
    return exchange(x_tbnw, _from_zigzag, _to_zigzag, group)


def zigzag_pieces(group: ProcessGroup) -> tuple[int, int]:
    """Return the indices, in [0, 2n), of the two pieces that this rank processes."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def _to_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    send_counts, order = _send_counts(len(x_tbnw), group)
    # Received rows are ordered by rank, and the early piece comes from the same or a lower rank.
    return all_to_all(_reorder_halves(x_tbnw, order), group, send_counts, _receive_counts(len(x_tbnw), group))


def _from_zigzag(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    receive_counts, order = _send_counts(len(x_tbnw), group)
    return _reorder_halves(all_to_all(x_tbnw, group, _receive_counts(len(x_tbnw), group), receive_counts), order)


def _send_counts(num_rows: int, group: ProcessGroup) -> tuple[list[int], list[int]]:
    """Return the number of rows sent to each rank, and the order of this rank's two pieces by receiving rank."""
    size, pieces = group.size(), (2 * group.rank(), 2 * group.rank() + 1)
    workers = [min(piece, 2 * size - 1 - piece) for piece in pieces]
    return _rows_per_rank(workers, num_rows // 2, size), [0, 1] if workers[0] <= workers[1] else [1, 0]


def _receive_counts(num_rows: int, group: ProcessGroup) -> list[int]:
    return _rows_per_rank([piece // 2 for piece in zigzag_pieces(group)], num_rows // 2, group.size())


def _rows_per_rank(ranks: list[int], rows: int, size: int) -> list[int]:
    return [rows * ranks.count(rank) for rank in range(size)]


def _reorder_halves(x_tbnw: Tensor, order: list[int]) -> Tensor:
    """Return the two halves of the rows in the given order. Each order is its own inverse."""
    return x_tbnw if order == [0, 1] else torch.cat(x_tbnw.chunk(2)[::-1])
