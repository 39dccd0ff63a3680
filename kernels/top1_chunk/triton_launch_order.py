"""Launches that order rows by the chunk they chose and cut the order into work items."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.top1_chunk import triton_group
from kernels.top1_chunk.triton_problem import Problem


class Segments(NamedTuple):
    """Rows of an order, cut into work items; see `triton_group.cut_segments`."""

    items: Tensor
    num_items: Tensor
    """int32 [1], how many of `items` there are."""
    part_ends: Tensor
    part_counts: Tensor
    num_parts: int
    """Upper bound of the segments of chunks that have several."""


def group(problem: Problem, chosen_gr: Tensor) -> tuple[Tensor, Tensor]:
    """Order the rows by one choice, int32 [hkv, rows].

    Returns:
        order: int32, rows by key head, then slot, then row.
        ends: int32 [hkv * (slots + 1)], where each bin ends in it; the last bin of a head holds those that chose none.
    """
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
    return order, ends[:, -1].contiguous()


def cut(problem: Problem, ends: Tensor, size: int, most: int) -> Segments:
    """Cut each bin's rows into segments of `size`; the last bin of a head, of those that chose none, is left out.

    Args:
        problem: with the heads that the bins are of.
        ends: int32 [hkv * (slots + 1)], where each bin ends in the order.
        size: rows of a segment.
        most: rows of the order, at most.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    counts.view(problem.num_groups, -1)[:, -1] = 0
    segments = (counts + (size - 1)) // size
    parts = segments * (segments > 1)
    item_ends = segments.cumsum(0, dtype=torch.int32)
    part_ends = parts.cumsum(0, dtype=torch.int32)
    num_items = problem.num_groups * problem.slots + most // size
    items = torch.empty(num_items, triton_group.ITEM_COLUMNS.value, dtype=torch.int32, device=ends.device)
    block = 128
    triton_group.cut_segments[(-(-num_items // block),)](
        item_ends, segments, ends, counts, part_ends, parts, problem.table, items, num_items, len(ends),
        problem.slots,
        SEGMENT=size, STEPS=len(ends).bit_length(), BLOCK=block,
    )  # fmt: skip
    return Segments(items, item_ends[-1:], part_ends, parts, 2 * (most // size))
