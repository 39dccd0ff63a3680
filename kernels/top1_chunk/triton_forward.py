"""Attention to the chosen chunks and to the query's own chunk, combined through the log-sum-exp, in Triton.

The first pass attends to each row's best chosen chunk, and writes the rows' output and log-sum-exp. Each further pass
attends to the next best chunk, and the last (local) pass to the own chunk. These passes read output and log-sum-exp,
combine them with their own result and write them again. The local pass is last because it processes the rows in memory
order, which makes reading cheap. A pass processes each row once, so there are no write conflicts and no atomics.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import load_rows, store_rows
from kernels.top1_chunk.triton_attend import COLUMNS, attend, first_slot, head_rows, join, own_rows
from kernels.top1_chunk.triton_group import ITEM_COLUMNS


@triton.jit
def attend_chosen(
    q, k, v, out, lse, order, items, rows, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, JOINS: tl.constexpr,
):  # fmt: skip
    """Attend to the chosen chunks; a program handles up to BLOCK_M rows that chose the same chunk. Grid (items,).

    Args:
        q: queries [tokens, G * R, d].
        k, v: keys and values [tokens, G, d].
        out: [tokens, G * R, d], written; with JOINS, combined with its old content.
        lse: fp32 [G, rows], written; with JOINS, combined with its old content.
        order: int32, rows grouped by chosen chunk.
        items: int32 [items, ITEM_COLUMNS] from `cut_segments`, each of at most BLOCK_M rows.
    """
    item = items + tl.program_id(0) * ITEM_COLUMNS
    begin, end, g, key_start = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if begin < end:
        m = begin + tl.arange(0, BLOCK_M)
        valid = m < end
        row = tl.load(order + m, mask=valid, other=0)
        heads = head_rows(row, g, G, R)
        queries = load_rows(q, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        out_md, lse_m = attend(
            queries, k + g * HEAD_DIM, v + g * HEAD_DIM, key_start, m, CHUNK, scale_log2,
            False, G * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        lse_g = lse + g.to(tl.int64) * rows + row
        if JOINS:
            old_out = load_rows(out, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
            out_md, lse_m = join(old_out, tl.load(lse_g, mask=valid, other=0.0), out_md, lse_m)
        store_rows(out, heads, valid, HEAD_DIM, out_md, HEAD_DIM, BLOCK_D)
        tl.store(lse_g, lse_m, mask=valid)


@triton.jit
def attend_local(
    q, k, v, out, lse, chosen, table, rows, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of the own chunk up to the query, and combine the result with `out` and `lse`.

    Without LOCAL, only queries of a document's first chunk attend. Grid (slots * TILES * G,): heads of one chunk are
    consecutive, as in memory.

    Args:
        q, k, v: as in `attend_chosen`.
        out, lse: output of `attend_chosen`, updated; 0 and -inf for rows that attend to nothing.
        chosen: int32 [G, rows], slot of a row's best chunk; -1 if `attend_chosen` wrote nothing for the row.
    """
    g, tile = tl.program_id(0) % G, tl.program_id(0) // G
    slot = tile // TILES
    row, position, valid, seen = own_rows(table, slot, tile % TILES, R, BLOCK_M)
    if not LOCAL:
        seen = tl.where(slot == first_slot(table, slot), seen, 0)
    heads = head_rows(row, g, G, R)
    index = g.to(tl.int64) * rows + row
    queries = load_rows(q, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
    out_md, lse_m = attend(
        queries, k + g * HEAD_DIM, v + g * HEAD_DIM, tl.load(table + slot * COLUMNS), position, seen, scale_log2,
        True, G * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    is_written = tl.load(chosen + index, mask=valid, other=-1) >= 0
    old_out = load_rows(out, heads, is_written, HEAD_DIM, HEAD_DIM, BLOCK_D)
    out_md, lse_m = join(old_out, tl.load(lse + index, mask=is_written, other=-float("inf")), out_md, lse_m)
    store_rows(out, heads, valid, HEAD_DIM, out_md, HEAD_DIM, BLOCK_D)
    tl.store(lse + index, lse_m, mask=valid)
