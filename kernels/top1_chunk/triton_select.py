"""Chunk selection, in Triton: score earlier chunks and keep the best so far.

No [rows, chunks] array is written to memory. Rows and table columns are those of `triton_attend`.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_lists import insert, insert_tile, store_list
from kernels.common.triton_math import MAX_INT32, load_rows, product
from kernels.top1_chunk.triton_attend import COLUMNS, first_slot, head_rows, own_rows


@triton.jit
def mean_keys(
    k, means, table,
    G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the mean key of every slot and key head: [slots, G, d] in k's dtype, summed in fp32. Grid (slots, G)."""
    slot, g = tl.program_id(0), tl.program_id(1)
    start = tl.load(table + slot * COLUMNS)
    count = tl.load(table + slot * COLUMNS + 1)
    total = tl.zeros([BLOCK_D], tl.float32)
    for j in tl.static_range(0, CHUNK, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        keys = load_rows(k + g * HEAD_DIM, start + n, n < count, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        total += tl.sum(keys.to(tl.float32), 0)
    d = tl.arange(0, BLOCK_D)
    tl.store(means + (slot * G + g) * HEAD_DIM + d, (total / count).to(means.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _own_queries(
    q, table, slots, limit,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Return a program's tile of rows, and the range of slots that the rows choose from.

    The range contains the document's slots before the rows' own slot, limited to the document's first `limit` slots.

    Returns:
        (end of the range, start of the range, row [M], valid [M], queries [M, BLOCK_D]).
    """
    program = tl.program_id(0)
    slot = slots - 1 - program // TILES
    row, _, valid, _ = own_rows(table, slot, program % TILES, R, BLOCK_M)
    queries = load_rows(q, head_rows(row, tl.program_id(1), G, R), valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
    first = first_slot(table, slot)
    return tl.minimum(slot, first + limit), first, row, valid, queries


@triton.jit
def _store_best(slot_pointers, best, row, valid, scores, slots, first, slot, SCORES: tl.constexpr):
    """Write the slot of each row's best score, given scores [M, N]. The lowest slot wins a tie.

    The slot is `first` if all scores are NaN, and -1 if there are no slots to choose from. With SCORES, also write the
    score to `best`.
    """
    index = tl.min(tl.where(scores == tl.max(scores, 1)[:, None], slots, MAX_INT32), 1)
    index = tl.where(index == MAX_INT32, first, index)
    tl.store(slot_pointers + row, tl.where(slot > first, index, -1), mask=valid)
    if SCORES:
        tl.store(best + row, tl.max(scores, 1), mask=valid)


@triton.jit
def select_by_mean(
    q, means, chosen, table, rows, slots,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, TOP_K: tl.constexpr, LIST_SIZE: tl.constexpr,
):  # fmt: skip
    """Select by q . mean key. Grid (slots * TILES, G), the last slots first, because they have the most work.

    Args:
        q: queries [tokens, G * R, d].
        means: [slots, G, d].
        chosen: int32 [TOP_K, G, rows], written: slots, -1 for a missing chunk.
    """
    g = tl.program_id(1)
    slot, first, row, valid, queries = _own_queries(q, table, slots, slots, G, R, HEAD_DIM, BLOCK_D, BLOCK_M, TILES)
    n = tl.arange(0, BLOCK_N)
    slot_pointers = chosen + g.to(tl.int64) * rows
    stride = tl.full((), G, tl.int64) * rows
    if TOP_K == 1:
        best = tl.full([BLOCK_M, BLOCK_N], -float("inf"), tl.float32)
        best_slot = tl.zeros([BLOCK_M, BLOCK_N], tl.int32) + first
        # Complete tiles need no mask. Masking would take a fifth of the loop's time.
        full_end = first + (slot - first) // BLOCK_N * BLOCK_N
        for start in range(first, full_end, BLOCK_N):
            tile = load_rows(means + g * HEAD_DIM, start + n, n >= 0, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            scores = product(queries, tile.T)
            best_slot = tl.where(scores > best, start, best_slot)
            best = tl.maximum(best, scores)
        inside = full_end + n < slot
        tile = load_rows(means + g * HEAD_DIM, full_end + n, inside, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        scores = tl.where(inside[None, :], product(queries, tile.T), -float("inf"))
        best_slot = tl.where(scores > best, full_end, best_slot)
        best = tl.maximum(best, scores)
        _store_best(slot_pointers, slot_pointers, row, valid, best, best_slot + n[None, :], first, slot, False)
    else:
        top_scores = tl.full([BLOCK_M, LIST_SIZE], -float("inf"), tl.float32)
        top_slots = tl.full([BLOCK_M, LIST_SIZE], -1, tl.int32)
        for start in range(first, slot, BLOCK_N):
            tile = load_rows(means + g * HEAD_DIM, start + n, start + n < slot, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            scores = tl.where((start + n < slot)[None, :], product(queries, tile.T), -float("inf"))
            top_scores, top_slots = insert_tile(top_scores, top_slots, scores, start)
        store_list(slot_pointers, slot_pointers, top_scores, top_slots, row, valid, stride, TOP_K, False)


@triton.jit
def _chunk_scores(products, SCALE_LOG2, CHUNK: tl.constexpr, LSE: tl.constexpr):
    """Reduce products [M, N] of complete chunks to scores [M, N // CHUNK]; in units of log2 for LSE."""
    M: tl.constexpr = products.shape[0]
    products_mcn = tl.reshape(products, [M, products.shape[1] // CHUNK, CHUNK])
    highest = tl.max(products_mcn, 2)
    if not LSE:
        return highest
    total = tl.sum(tl.exp2((products_mcn - highest[:, :, None]) * SCALE_LOG2), 2)
    return highest * SCALE_LOG2 + tl.log2(total)


@triton.jit
def select_by_keys(
    q, k, chosen, scores, table, rows, slots, limit, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, TOP_K: tl.constexpr, LIST_SIZE: tl.constexpr,
    LSE: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Select by the highest q . key of a chunk, or by the log-sum-exp of scale * q . key. Grid (slots * TILES, G).

    A chunk is one or several tiles of keys. Its score accumulates in `highest` and `total` over these tiles.

    Args:
        q: queries [tokens, G * R, d].
        k: keys [tokens, G, d].
        chosen: int32 [TOP_K, G, rows], written: slots, -1 for a missing chunk.
        scores: fp32 [TOP_K, G, rows], written with SCORES, in units of log2 with LSE; -inf for a missing chunk.
        limit: number of a document's first slots that may be selected.
        scale_log2: scale / ln 2; only used by LSE.
    """
    g = tl.program_id(1)
    slot, first, row, valid, queries = _own_queries(q, table, slots, limit, G, R, HEAD_DIM, BLOCK_D, BLOCK_M, TILES)
    first_key = tl.load(table + first * COLUMNS)
    slot_pointers, score_pointers = chosen + g.to(tl.int64) * rows, scores + g.to(tl.int64) * rows
    n = tl.arange(0, BLOCK_N)
    top_scores = tl.full([BLOCK_M, LIST_SIZE], -float("inf"), tl.float32)
    top_slots = tl.full([BLOCK_M, LIST_SIZE], -1, tl.int32)
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    best_slot = tl.zeros([BLOCK_M], tl.int32) + first
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for j in range(0, (slot - first) * CHUNK, BLOCK_N):
        keys = load_rows(k + g * HEAD_DIM, first_key + j + n, n >= 0, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        products = product(queries, keys.T)
        before = tl.where(j % CHUNK == 0, -float("inf"), highest)
        highest = tl.maximum(before, tl.max(products, 1))
        score = highest
        if LSE:
            level = tl.where(highest == -float("inf"), 0.0, highest)
            total = tl.where(j % CHUNK == 0, 0.0, total * tl.exp2((before - level) * scale_log2))
            total += tl.sum(tl.exp2((products - level[:, None]) * scale_log2), 1)
            score = highest * scale_log2 + tl.log2(total)
        is_last_tile = (j + BLOCK_N) % CHUNK == 0
        c = first + j // CHUNK
        if TOP_K == 1:
            better = is_last_tile & (score > best)
            best = tl.where(better, score, best)
            best_slot = tl.where(better, c, best_slot)
        else:
            inserted_slot = tl.where(is_last_tile, c, -1) + tl.zeros([BLOCK_M], tl.int32)
            top_scores, top_slots = insert(top_scores, top_slots, score, inserted_slot)
    if TOP_K == 1:
        tl.store(slot_pointers + row, tl.where(slot > first, best_slot, -1), mask=valid)
        if SCORES:
            tl.store(score_pointers + row, best, mask=valid)
    else:
        stride = tl.full((), G, tl.int64) * rows
        store_list(slot_pointers, score_pointers, top_scores, top_slots, row, valid, stride, TOP_K, SCORES)


@triton.jit
def select_by_keys_of_short_chunks(
    q, k, chosen, scores, table, rows, slots, limit, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, TOP_K: tl.constexpr, LIST_SIZE: tl.constexpr,
    LSE: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Implement `select_by_keys` for tiles of keys that contain several chunks. Grid (slots * TILES, G)."""
    g = tl.program_id(1)
    slot, first, row, valid, queries = _own_queries(q, table, slots, limit, G, R, HEAD_DIM, BLOCK_D, BLOCK_M, TILES)
    first_key = tl.load(table + first * COLUMNS)
    slot_pointers, score_pointers = chosen + g.to(tl.int64) * rows, scores + g.to(tl.int64) * rows
    PER_TILE: tl.constexpr = BLOCK_N // CHUNK
    n, p = tl.arange(0, BLOCK_N), tl.arange(0, PER_TILE)
    top_scores = tl.full([BLOCK_M, LIST_SIZE], -float("inf"), tl.float32)
    top_slots = tl.full([BLOCK_M, LIST_SIZE], -1, tl.int32)
    best = tl.full([BLOCK_M, PER_TILE], -float("inf"), tl.float32)
    best_slot = tl.zeros([BLOCK_M, PER_TILE], tl.int32) + first
    for c in range(first, slot, PER_TILE):
        inside = n < (slot - c) * CHUNK
        token = first_key + (c - first) * CHUNK + n
        keys = load_rows(k + g * HEAD_DIM, token, inside, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        chunk_scores = _chunk_scores(product(queries, keys.T), scale_log2, CHUNK, LSE)
        chunk_scores = tl.where((c + p < slot)[None, :], chunk_scores, -float("inf"))
        if TOP_K == 1:
            best_slot = tl.where(chunk_scores > best, c, best_slot)
            best = tl.maximum(best, chunk_scores)
        else:
            top_scores, top_slots = insert_tile(top_scores, top_slots, chunk_scores, c)
    if TOP_K == 1:
        _store_best(slot_pointers, score_pointers, row, valid, best, best_slot + p[None, :], first, slot, SCORES)
    else:
        stride = tl.full((), G, tl.int64) * rows
        store_list(slot_pointers, score_pointers, top_scores, top_slots, row, valid, stride, TOP_K, SCORES)
