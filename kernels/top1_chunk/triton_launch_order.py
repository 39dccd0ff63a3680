"""Launches that order rows by the chunk they chose and divide the order into work items."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.top1_chunk import triton_group
from kernels.top1_chunk.triton_problem import Problem


class Order(NamedTuple):
    """Rows ordered by key head, then by chosen chunk; rows without a choice are last within a head."""

    rows: Tensor
    """int32, indices of rows within their key head."""
    ends: Tensor
    """int32 [bins, counts per bin], a running sum. There are hkv * (slots + 1) bins, one per key head and slot and one
    per key head for rows without a choice. A bin's last entry is its end in `rows`, unless it exceeds the length of
    `rows`."""


class Segments(NamedTuple):
    """Work items of an order; see `triton_group.cut_segments`."""

    items: Tensor
    """int32 [items, ITEM_COLUMNS]."""
    part_ends: Tensor
    """int32 [bins], running sum of `part_counts`."""
    part_counts: Tensor
    """int32 [bins], number of segments of a bin with several segments; 0 for other bins."""
    num_parts: int
    """Upper bound of the sum of `part_counts`."""


def order_by_chunk(problem: Problem, chosen_gr: Tensor) -> Order:
    """Order the rows stably by their slot in `chosen_gr`, int32 [hkv, rows]."""
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


def cut_into_segments(problem: Problem, order: Order, size: int, max_rows: int) -> Segments:
    """Divide each bin's rows into segments of `size`; a head's last bin, of rows without a choice, has no segments.

    Args:
        problem: problem whose key heads are ordered.
        order: order of the problem's rows.
        size: maximum rows per segment.
        max_rows: upper bound of the number of rows with a choice.
    """
    ends, capacity = order.ends, len(order.rows)
    (bins, stride), block = ends.shape, 128
    # One running sum over both rows. Parts come first, so that their indices start at 0.
    counts = torch.empty(2, bins, dtype=torch.int32, device=ends.device)
    triton_group.count_segments[(-(-bins // block),)](
        ends, counts, bins, stride, capacity, problem.slots, SEGMENT=size, BLOCK=block
    )
    running = counts.view(-1).cumsum(0, dtype=torch.int32).view_as(counts)
    num_items = problem.num_groups * problem.slots + max_rows // size
    items = torch.empty(num_items, triton_group.ITEM_COLUMNS.value, dtype=torch.int32, device=ends.device)
    triton_group.cut_segments[(-(-num_items // block),)](
        running, counts, ends, problem.table, items, num_items, bins, stride, capacity, problem.slots,
        SEGMENT=size, STEPS=bins.bit_length(), BLOCK=block,
    )  # fmt: skip
    return Segments(items, running[0], counts[0], 2 * (max_rows // size))
