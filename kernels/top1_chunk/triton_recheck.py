"""Rescore candidates in the inputs' precision and select the best, in Triton.

The products are bitwise those of `select_by_keys`. Rows are grouped by their candidates' chunks, so that tensor cores
compute the products. Each row's candidate with the highest bound is scored first. Its score excludes most of the other
candidates. The remaining ones are scored next. The order of rows within a group comes from atomic counters and differs
between runs. The selection is deterministic, because a maximum does not depend on the order.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import MAX_INT32, load_rows, product
from kernels.top1_chunk.triton_attend import COLUMNS, first_slot, head_rows, own_rows
from kernels.top1_chunk.triton_group import ITEM_COLUMNS
from kernels.top1_chunk.triton_screen import LARGEST, SMALLEST, chunk_index, upper_bound

INITIAL_RANK = tl.constexpr(-(2**63))
"""Initial value of a row's highest `_rank`, below every rank."""

COUNTERS = tl.constexpr(32)
"""Number of counters per chunk. There are several because atomic additions to one address are serialised."""

ROUNDING = tl.constexpr(2**-20)
"""Upper bound of the relative rounding error of a few operations in fp32."""


@triton.jit
def _counter(counts, g, slots, slot, program):
    """Return the pointer to a program's counter for a chunk, in an array `counts` [heads, slots + 1, COUNTERS]."""
    return counts + (g * (slots + 1) + slot) * COUNTERS + program % COUNTERS


@triton.jit
def _append_missed(missed_rows, missed_slots, num_missed, g, row, slot, missed, rows):
    index = g.to(tl.int64) * rows + tl.atomic_add(num_missed + g + tl.zeros_like(row), 1, mask=missed)
    tl.store(missed_rows + index, row, mask=missed)
    tl.store(missed_slots + index, slot + tl.zeros_like(row), mask=missed)


@triton.jit
def _rank(score, slot):
    """Pack score and slot into an int64 that rises with the score and, for equal scores, falls with the slot."""
    # -0 and 0 are equal scores. NaN becomes -inf.
    score = tl.where(score == score, score + 0.0, -float("inf"))
    bits = score.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & MAX_INT32)
    return (rising.to(tl.int64) << 32) | (tl.full((), MAX_INT32, tl.int64) - slot)


@triton.jit
def _score(rank):
    """Return the score packed by `_rank`; NaN for INITIAL_RANK."""
    rising = (rank >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & MAX_INT32)).to(tl.float32, bitcast=True)


@triton.jit
def count_first(
    candidates, counts, floors, chosen, chunk_counts, missed_rows, missed_slots, num_missed, table, rows, slots,
    R: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Exclude candidates below the final lower bounds, and count the rows by the chunk of their first candidate.

    A row with a single remaining candidate needs no score: its selection is written. Rows with too many candidates are
    listed. Grid (slots * TILES, heads).

    Args:
        candidates: output of `screen`; reduced to the remaining ones, the one with the highest bound first.
        counts: output of `screen`; replaced by the number of remaining candidates, 0 if nothing needs to be scored.
        floors: output of `screen`.
        chosen: int32 [heads, rows], written for rows with one remaining candidate, or with none (-1).
        chunk_counts: int32 [heads, slots + 1, COUNTERS], zero before; written: number of rows to score per chunk.
        missed_rows, missed_slots: int32 [heads, rows], written: rows with over CAPACITY candidates, and their slots.
        num_missed: int32 [heads], zero before; written.
    """
    program, g = tl.program_id(0), tl.program_id(1)
    slot = program // TILES
    row, _, valid, _ = own_rows(table, slot, program % TILES, R, BLOCK_M)
    first = first_slot(table, slot)
    index = g.to(tl.int64) * rows + row
    count = tl.load(counts + index, mask=valid, other=0)
    floor = tl.load(floors + index, mask=valid, other=0.0)
    entries = candidates + g.to(tl.int64) * CAPACITY * rows + row
    missed = count > CAPACITY
    count = tl.where(missed, 0, count)
    num_left = tl.zeros([BLOCK_M], tl.int32)
    best_entry = tl.zeros([BLOCK_M], tl.int32)
    for i in range(tl.max(count)):
        entry = tl.load(entries + i * rows, mask=i < count, other=0)
        survives = (i < count) & ((upper_bound(entry) < floor) == 0)
        is_best = survives & ((num_left == 0) | (upper_bound(entry) > upper_bound(best_entry)))
        # In place: the index written is never above the index read.
        tl.store(entries + num_left * rows, tl.where(is_best, best_entry, entry), mask=survives & (num_left > 0))
        best_entry = tl.where(is_best, entry, best_entry)
        num_left += survives.to(tl.int32)
    best_chunk = first + chunk_index(best_entry)
    tl.store(chosen + index, tl.where(num_left == 1, best_chunk, -1), mask=valid & (num_left < 2) & (missed == 0))
    num_left = tl.where(num_left < 2, 0, num_left)
    tl.store(counts + index, num_left, mask=valid)
    tl.store(entries, best_entry, mask=num_left > 0)
    tl.atomic_add(_counter(chunk_counts, g, slots, best_chunk, program), 1, mask=num_left > 0)
    _append_missed(missed_rows, missed_slots, num_missed, g, row, slot, missed, rows)


@triton.jit
def count_others(
    candidates, counts, floors, query_scales, best, chunk_counts, table, rows, slots,
    R: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Count by chunk the candidates that may beat their row's first candidate. Grid (slots * TILES, heads).

    Args:
        candidates, counts: output of `count_first`; reduced to the candidates that may win.
        floors: output of `screen`.
        query_scales: output of `quantise_queries`.
        best: int64 [heads, rows], the `_rank` of each row's first candidate.
        chunk_counts: as in `count_first`.
    """
    program, g = tl.program_id(0), tl.program_id(1)
    slot = program // TILES
    row, _, valid, _ = own_rows(table, slot, program % TILES, R, BLOCK_M)
    first = first_slot(table, slot)
    index = g.to(tl.int64) * rows + row
    count = tl.load(counts + index, mask=valid, other=0)
    scored = count > 0
    score = _score(tl.load(best + index, mask=scored, other=INITIAL_RANK))
    scale = query_scales + g.to(tl.int64) * 2 * rows + row
    offset = tl.load(scale + rows, mask=scored, other=0.0)
    # The score is converted to the unit of the bounds, (q.k - q.c) / sq.
    slack = (tl.abs(score) + tl.abs(offset) + SMALLEST) * ROUNDING
    raised_floor = (score - offset - slack) / tl.load(scale, mask=scored, other=1.0)
    floor = tl.load(floors + index, mask=scored, other=0.0)
    floor = tl.where((raised_floor > floor) & (raised_floor < LARGEST), raised_floor, floor)
    entries = candidates + g.to(tl.int64) * CAPACITY * rows + row
    num_left = scored.to(tl.int32)
    for i in range(1, tl.max(count)):
        entry = tl.load(entries + i * rows, mask=i < count, other=0)
        survives = (i < count) & ((upper_bound(entry) < floor) == 0)
        tl.store(entries + num_left * rows, entry, mask=survives)
        tl.atomic_add(_counter(chunk_counts, g, slots, first + chunk_index(entry), program), 1, mask=survives)
        num_left += survives.to(tl.int32)
    tl.store(counts + index, num_left, mask=valid)


@triton.jit
def place_counted(
    candidates, counts, chunk_counts, ends, order, capacity, missed_rows, missed_slots, num_missed, table, rows, slots,
    R: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, CAPACITY: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Write the rows counted by `count_first` (FIRST) or `count_others`, chunk by chunk. Grid (slots * TILES, heads).

    Args:
        candidates, counts: output of the counting kernel.
        chunk_counts: output of the counting kernel; reset to zero.
        ends: int32 [heads, slots + 1, COUNTERS], running sum of `chunk_counts`: the end of each counter's rows.
        order: int32 [capacity], written: rows, ordered by head, then chunk.
        missed_rows, missed_slots, num_missed: as in `count_first`. Rows that do not fit in `order` are added.
    """
    program, g = tl.program_id(0), tl.program_id(1)
    slot = program // TILES
    row, _, valid, _ = own_rows(table, slot, program % TILES, R, BLOCK_M)
    first = first_slot(table, slot)
    index = g.to(tl.int64) * rows + row
    count = tl.load(counts + index, mask=valid, other=0)
    entries = candidates + g.to(tl.int64) * CAPACITY * rows + row
    is_missed = count < 0
    begin, end = 1, count
    if FIRST:
        begin, end = 0, tl.minimum(count, 1)
    for i in range(begin, tl.max(end)):
        placed = i < end
        chunk = first + chunk_index(tl.load(entries + i * rows, mask=placed, other=0))
        end_of_count = tl.load(_counter(ends, g, slots, chunk, program), mask=placed, other=0)
        target = end_of_count - tl.atomic_add(_counter(chunk_counts, g, slots, chunk, program), -1, mask=placed)
        tl.store(order + target, row, mask=placed & (target < capacity))
        is_missed = is_missed | (placed & (target >= capacity))
    _append_missed(missed_rows, missed_slots, num_missed, g, row, slot, is_missed, rows)


@triton.jit
def recheck(
    q, k, best, order, items, rows,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Score the candidates and keep the best of each row. Grid (items,).

    Args:
        q, k: queries and keys of the first head.
        best: int64 [heads, rows], initially INITIAL_RANK; raised to the highest `_rank`.
        order: output of `place_counted`.
        items: output of `cut_segments`.
    """
    item = items + tl.program_id(0) * ITEM_COLUMNS
    begin, end, g = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if begin < end:
        start, slot = tl.load(item + 3), tl.load(item + 5)
        n = tl.arange(0, BLOCK_N)
        for j in tl.static_range(0, CHUNK, BLOCK_N):
            keys = load_rows(k + g * HEAD_DIM, start + j + n, n >= 0, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            for i in range(begin, end, BLOCK_M):
                m = i + tl.arange(0, BLOCK_M)
                valid = m < end
                row = tl.load(order + m, mask=valid, other=0)
                queries = load_rows(q, head_rows(row, g, G, R), valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
                score = tl.max(product(queries, keys.T), 1)
                tl.atomic_max(best + g.to(tl.int64) * rows + row, _rank(score, slot), mask=valid)


@triton.jit
def score_missed(
    q, k, best, missed_rows, missed_slots, num_missed, table, rows,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Score all earlier chunks of the rows with incomplete candidates. Grid (programs, heads), with any first size.

    The chunks of a tile of rows are divided among SHARES programs, because one program would take long for a tile.

    Args:
        best: as in `recheck`.
        missed_rows, missed_slots, num_missed: output of `count_first` and `place_counted`.
    """
    g = tl.program_id(1)
    PER_CHUNK: tl.constexpr = CHUNK // BLOCK_N
    total = tl.load(num_missed + g)
    for i in range(tl.program_id(0), tl.cdiv(total, BLOCK_M) * SHARES, tl.num_programs(0)):
        m = i // SHARES * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = m < total
        index = g.to(tl.int64) * rows + m
        row = tl.load(missed_rows + index, mask=valid, other=0)
        slot = tl.load(missed_slots + index, mask=valid, other=0)
        first = first_slot(table, slot)
        queries = load_rows(q, head_rows(row, g, G, R), valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        highest = tl.full([BLOCK_M], INITIAL_RANK, tl.int64)
        begin, end = tl.min(tl.where(valid, first, MAX_INT32)), tl.max(tl.where(valid, slot, 0))
        first_chunk = begin + i % SHARES
        # A single loop over the tiles of all chunks, because Triton does not prefetch in nested loops.
        for j in range(tl.cdiv(end - first_chunk, SHARES) * PER_CHUNK):
            c = first_chunk + j // PER_CHUNK * SHARES
            start, count = tl.load(table + c * COLUMNS), tl.load(table + c * COLUMNS + 1)
            n = j % PER_CHUNK * BLOCK_N + tl.arange(0, BLOCK_N)
            keys = load_rows(k + g * HEAD_DIM, start + n, n < count, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            rank = _rank(tl.max(product(queries, keys.T), 1), c)
            highest = tl.where((c >= first) & (c < slot), tl.maximum(highest, rank), highest)
        tl.atomic_max(best + g.to(tl.int64) * rows + row, highest, mask=valid)


@triton.jit
def take_best(best, chosen, total, BLOCK: tl.constexpr):
    """Write the selection of the rows that were scored. Grid (total / BLOCK,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(best + i, mask=i < total, other=INITIAL_RANK)
    tl.store(chosen + i, -(rank & MAX_INT32).to(tl.int32) + MAX_INT32, mask=rank > INITIAL_RANK)
