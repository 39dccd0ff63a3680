"""Attention to the own chunk and to a chosen one, joined through the logsumexp, in Triton.

The local pass writes every row's output and logsumexp; each pass over a choice reads both, joins its part and writes
them again. A row is in one place of an order, so nothing is written twice and nothing is atomic.
"""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import triton
import triton.language as tl

from kernels.top1_chunk.triton_attend import COLUMNS, attend, head_rows, own_rows
from kernels.triton_math import load_rows, store_rows


@triton.jit
def attend_local(
    q, k, v, out, lse, table, rows, slots, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Attend to the own chunk up to oneself; without LOCAL only in a document's first chunk. Grid (slots * TILES, G).

    Args:
        q: queries [tokens, G * R, d].
        k, v: keys and values [tokens, G, d].
        out: [tokens, G * R, d], out; 0 where nothing is attended to.
        lse: fp32 [G, rows], out; -inf there.
    """
    program, g = tl.program_id(0), tl.program_id(1)
    slot = program // TILES
    row, position, valid, seen = own_rows(table, slot, program % TILES, R, BLOCK_M)
    if not LOCAL:
        seen = tl.where(slot == tl.load(table + slot * COLUMNS + 5), seen, 0)
    heads = head_rows(row, g, G, R)
    queries = load_rows(q, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
    mixed, level = attend(
        queries, k + g * HEAD_DIM, v + g * HEAD_DIM, tl.load(table + slot * COLUMNS), position, seen, scale_log2,
        True, G * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    store_rows(out, heads, valid, HEAD_DIM, mixed, HEAD_DIM, BLOCK_D)
    tl.store(lse + g.to(tl.int64) * rows + row, level, mask=valid)


@triton.jit
def attend_chosen(
    q, k, v, out, lse, order, items, rows, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Attend to the chosen chunk, up to BLOCK_M rows that chose the same one together, and join. Grid (items,).

    Args:
        out, lse: as `attend_local` wrote them; read and written.
        order: rows grouped by choice, int32.
        items: int32 [items, 6] as from `cut_segments`, of at most BLOCK_M rows.
    """
    item = items + tl.program_id(0) * 6
    begin, end, g, key_start = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if begin < end:
        m = begin + tl.arange(0, BLOCK_M)
        valid = m < end
        row = tl.load(order + m, mask=valid, other=0)
        heads = head_rows(row, g, G, R)
        queries = load_rows(q, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        # Read here, long before it is needed.
        lse_g = lse + g.to(tl.int64) * rows + row
        before = tl.load(lse_g, mask=valid, other=0.0)
        local = load_rows(out, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        mixed, here = attend(
            queries, k + g * HEAD_DIM, v + g * HEAD_DIM, key_start, m, CHUNK, scale_log2,
            False, G * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        top = tl.maximum(before, here)
        old, new = tl.exp2(before - top), tl.exp2(here - top)
        mixed = (mixed * new[:, None] + local * old[:, None]) / (old + new)[:, None]
        store_rows(out, heads, valid, HEAD_DIM, mixed, HEAD_DIM, BLOCK_D)
        tl.store(lse_g, top + tl.log2(old + new), mask=valid)
