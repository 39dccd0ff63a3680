"""Launches that order rows by the chunk they chose and cut the order into work items."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.top1_chunk import triton_group
from kernels.top1_chunk.triton_problem import Problem


class Order(NamedTuple):
    """Rows by key head, then by the chunk that they chose; last of a head those that chose none."""

    rows: Tensor
    """int32."""
    ends: Tensor
    """int32 [hkv * (slots + 1), counts a bin], a running sum: its last of a bin is where the bin ends in the order, but
    for what the order has no place for."""


class Segments(NamedTuple):
    """Rows of an order, cut into work items; see `triton_group.cut_segments`."""

    items: Tensor
    part_ends: Tensor
    part_counts: Tensor
    num_parts: int
    """Upper bound of the segments of chunks that have several."""


def group(problem: Problem, chosen_gr: Tensor) -> Order:
    """Order the rows by one choice, int32 [hkv, rows]; those of a chunk are in the order that they were in."""
    num_groups, rows, slots, device = problem.num_groups, problem.rows, problem.slots, chosen_gr.device
    size = triton_group.ORDER_BLOCK
    blocks = -(-rows // size)
    grid, bins = (blocks, num_groups), num_groups * (slots + 1)
    keys = torch.empty(num_groups, blocks, size, dtype=torch.int32, device=device)
    counts = torch.zeros(bins, blocks, dtype=torch.int32, device=device)
    order = torch.empty(keys.numel(), dtype=torch.int32, device=device)
    triton_group.sort_blocks[grid](chosen_gr, keys, rows, slots, blocks, BLOCK=size, num_warps=8)
    triton_group.count_runs[grid](keys, counts, slots, blocks, BLOCK=size)
    ends = counts.view(-1).cumsum(0, dtype=torch.int32).view(bins, blocks)
    triton_group.place_rows[grid](keys, ends, counts, order, slots, blocks, BLOCK=size)
    return Order(order, ends)


def cut(problem: Problem, order: Order, size: int, most: int) -> Segments:
    """Cut each bin's rows into segments of `size`; the last bin of a head, of those that chose none, is left out.

    Args:
        problem: with the heads that the bins are of.
        order: of its rows.
        size: rows of a segment.
        most: rows that chose a chunk, at most.
    """
    ends, capacity = order.ends, len(order.rows)
    (bins, stride), block = ends.shape, 128
    # One running sum for both: parts first, as their numbers begin at 0.
    counts = torch.empty(2, bins, dtype=torch.int32, device=ends.device)
    triton_group.count_segments[(-(-bins // block),)](
        ends, counts, bins, stride, capacity, problem.slots, SEGMENT=size, BLOCK=block
    )
    running = counts.view(-1).cumsum(0, dtype=torch.int32).view_as(counts)
    num_items = problem.num_groups * problem.slots + most // size
    items = torch.empty(num_items, triton_group.ITEM_COLUMNS.value, dtype=torch.int32, device=ends.device)
    triton_group.cut_segments[(-(-num_items // block),)](
        running, counts, ends, problem.table, items, num_items, bins, stride, capacity, problem.slots,
        SEGMENT=size, STEPS=bins.bit_length(), BLOCK=block,
    )  # fmt: skip
    return Segments(items, running[0], counts[0], 2 * (most // size))
