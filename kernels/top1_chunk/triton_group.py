"""Group rows by the chunk they chose: a stable counting sort, in Triton.

Each block of BLOCK rows is sorted separately. A run is a sequence of rows of a sorted block that chose the same chunk.
The running sum of run lengths over chunks and blocks gives the destination of each run. There are no atomics and the
order is stable, so sums in this order are deterministic.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import MAX_INT32
from kernels.top1_chunk.triton_attend import COLUMNS

ORDER_BLOCK = 1024
ITEM_COLUMNS = tl.constexpr(6)


@triton.jit
def sort_blocks(chosen, keys, rows, slots, blocks, BLOCK: tl.constexpr):
    """Sort each block's rows by slot; rows without a choice are last, in bin `slots`. Grid (blocks, G).

    Args:
        chosen: int32 [G, rows].
        keys: int32 [G, blocks, BLOCK], written: slot * BLOCK + index in the block, ascending.
    """
    block, g = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    row = block * BLOCK + i
    slot = tl.load(chosen + g.to(tl.int64) * rows + row, mask=row < rows, other=-1)
    key = tl.where(slot < 0, slots, slot) * BLOCK + i
    tl.store(keys + (g.to(tl.int64) * blocks + block) * BLOCK + i, tl.sort(key))


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _runs(keys, BLOCK: tl.constexpr):
    """Return for each key of a sorted block: bin, row index in the block, index in its run, mask of the runs' ends."""
    i = tl.arange(0, BLOCK)
    key = tl.load(keys + i)
    before = tl.load(keys + i - 1, mask=i > 0, other=-1)
    after = tl.load(keys + i + 1, mask=i < BLOCK - 1, other=-1)
    bin = key // BLOCK
    begins = (i == 0) | (before // BLOCK != bin)
    ends = (i == BLOCK - 1) | (after // BLOCK != bin)
    start = tl.associative_scan(tl.where(begins, i, 0), 0, _maximum)
    return bin, key % BLOCK, i - start, ends


@triton.jit
def count_runs(keys, counts, slots, blocks, BLOCK: tl.constexpr):
    """Write the number of rows of a block that chose each slot. Grid (blocks, G).

    Args:
        counts: int32 [G, slots + 1, blocks], written; zero before.
    """
    block, g = tl.program_id(0), tl.program_id(1)
    bin, _, position, ends = _runs(keys + (g.to(tl.int64) * blocks + block) * BLOCK, BLOCK)
    tl.store(counts + (g.to(tl.int64) * (slots + 1) + bin) * blocks + block, position + 1, mask=ends)


@triton.jit
def place_rows(keys, ends, counts, order, slots, blocks, BLOCK: tl.constexpr):
    """Write the rows in the order of their bins. Grid (blocks, G).

    Args:
        keys: output of `sort_blocks`.
        ends: int32 [G, slots + 1, blocks], running sum of `counts`.
        counts: output of `count_runs`.
        order: int32 [G * blocks * BLOCK], written: rows, by g, then slot, then row.
    """
    block, g = tl.program_id(0), tl.program_id(1)
    bin, i, position, _ = _runs(keys + (g.to(tl.int64) * blocks + block) * BLOCK, BLOCK)
    run = (g.to(tl.int64) * (slots + 1) + bin) * blocks + block
    tl.store(order + tl.load(ends + run) - tl.load(counts + run) + position, block * BLOCK + i)


@triton.jit
def _bin_end(ends, bin, stride, capacity, exists):
    """Return the end of a bin in the order; 0 where the mask `exists` is False."""
    return tl.minimum(tl.load(ends + (bin.to(tl.int64) + 1) * stride - 1, mask=exists, other=0), capacity)


@triton.jit
def count_segments(ends, counts, bins, stride, capacity, slots, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Count the segments of SEGMENT rows of each bin; rows without a choice have none. Grid (bins / BLOCK,).

    Args:
        ends: int32 [bins, stride]; a bin's last entry is its end in the order, whose length is `capacity`.
        counts: int32 [2, bins], written: parts (the segments of bins with several segments), and segments.
    """
    bin = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = bin < bins
    begin = _bin_end(ends, bin - 1, stride, capacity, inside & (bin > 0))
    rows = _bin_end(ends, bin, stride, capacity, inside) - begin
    segments = tl.where(bin % (slots + 1) < slots, (rows + SEGMENT - 1) // SEGMENT, 0)
    tl.store(counts + bin, tl.where(segments > 1, segments, 0), mask=inside)
    tl.store(counts + bins + bin, segments, mask=inside)


@triton.jit
def cut_segments(
    running, counts, ends, table, items, num_items, bins, stride, capacity, slots,
    SEGMENT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the work items: each bin's rows in segments of SEGMENT. Grid (items / BLOCK,).

    Args:
        running: int32 [2, bins], running sum of `counts` over both rows.
        counts, ends, stride, capacity: as in `count_segments`.
        table: chunk table, see `chunks`.
        items: int32 [num_items, ITEM_COLUMNS], written: begin and end in the order, key head, first token of the chunk,
            index of the part or -1 for a bin's only segment, slot of the chunk. Unused items have begin = end.
    """
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = item + tl.load(running + bins - 1)  # position in the running sum, where segments follow all parts
    # Bisection for the first bin whose segments end beyond `position`.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + bins
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        beyond = tl.load(running + bins + middle, mask=middle < bins, other=MAX_INT32) > position
        high = tl.where(beyond, middle, high)
        low = tl.where(beyond, low, tl.minimum(middle + 1, bins))
    exists = low < bins
    end_of_segments = tl.load(running + bins + low, mask=exists, other=0)
    segment = position - end_of_segments + tl.load(counts + bins + low, mask=exists, other=0)
    end = _bin_end(ends, low, stride, capacity, exists)
    begin = _bin_end(ends, low - 1, stride, capacity, exists & (low > 0)) + segment * SEGMENT
    part_count = tl.load(counts + low, mask=exists, other=0)
    part = tl.load(running + low, mask=exists, other=0) - part_count + segment
    slot = low % (slots + 1)
    out = items + item * ITEM_COLUMNS
    inside = item < num_items
    tl.store(out, tl.where(exists, begin, 0), mask=inside)
    tl.store(out + 1, tl.where(exists, tl.minimum(begin + SEGMENT, end), 0), mask=inside)
    tl.store(out + 2, low // (slots + 1), mask=inside)
    tl.store(out + 3, tl.load(table + slot * COLUMNS, mask=exists, other=0), mask=inside)
    tl.store(out + 4, tl.where(part_count > 0, part, -1), mask=inside)
    tl.store(out + 5, slot, mask=inside)
