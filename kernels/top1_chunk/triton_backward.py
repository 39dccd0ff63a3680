"""Gradients of attention to the own and the chosen chunks, in Triton. The selection has no gradient.

With the probabilities p = exp2(s - lse) of the joint softmax and delta = do . o, the gradient of a score is
ds = p (do . v - delta). It is independent of other chunks, so each pass handles one chunk per row. The local pass
writes dq, dk and dv for the own chunk. Each further pass adds the gradients for one of a row's chosen chunks. A launch
handles keys FIRST_KEY .. FIRST_KEY + BLOCK_N - 1 of every chunk. Tiles are transposed, [keys, rows], so that dv and dk
need no transpose of p and ds.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import LOG2E, load_rows, product, store_rows
from kernels.top1_chunk.triton_attend import COLUMNS, first_slot, head_rows
from kernels.top1_chunk.triton_group import ITEM_COLUMNS


@triton.jit
def _tile_gradients(queries, grads, keys, values, visible, lse, delta, scale_log2):
    """Return the probabilities p and ds of a tile, [keys, rows] each, in fp32; ds without the factor `scale`."""
    scores = product(keys, queries.T) * scale_log2
    p = tl.where(visible, tl.exp2(scores - lse[None, :]), 0.0)
    return p, p * (product(values, grads.T) - delta[None, :])


@triton.jit
def differentiate_local(
    q, k, v, out, grad, lse, delta, dq, dk, dv, table, rows, scale,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_KEY: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dv for attention to the own chunk; at FIRST_KEY 0 also delta. Grid (slots, G).

    Args:
        q, out, grad, dq: [tokens, G * R, d].
        k, v, dk, dv: [tokens, G, d].
        lse: fp32 [G, rows], log-sum-exp in units of log2.
        delta: fp32 [G, rows], do . o, written at FIRST_KEY 0.
    """
    slot, g = tl.program_id(0), tl.program_id(1)
    entry = table + slot * COLUMNS
    key_start, key_count = tl.load(entry), tl.load(entry + 1)
    query_start, query_count, shift = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    attends = LOCAL or slot == first_slot(table, slot)
    n = FIRST_KEY + tl.arange(0, BLOCK_N)
    exists = n < key_count
    keys = load_rows(k + g * HEAD_DIM, key_start + n, exists, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
    values = load_rows(v + g * HEAD_DIM, key_start + n, exists, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
    dk_nd = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_nd = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    scale_log2 = scale * LOG2E
    # Rows before the first key of the key block see none of the block's keys.
    first_start = tl.maximum(FIRST_KEY - shift, 0) * R // BLOCK_M * BLOCK_M
    for start in range(first_start, query_count * R, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        valid = m < query_count * R
        row = query_start * R + m
        heads = head_rows(row, g, G, R)
        queries = load_rows(q, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        grads = load_rows(grad, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        index = g.to(tl.int64) * rows + row
        if FIRST_KEY == 0:
            out_md = load_rows(out, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
            delta_m = tl.sum(out_md.to(tl.float32) * grads.to(tl.float32), 1)
            tl.store(delta + index, delta_m, mask=valid)
        else:
            delta_m = tl.load(delta + index, mask=valid, other=0.0)
        lse_m = tl.load(lse + index, mask=valid, other=0.0)
        visible = attends & exists[:, None] & valid[None, :] & (n[:, None] <= (shift + m // R)[None, :])
        p_nm, ds_nm = _tile_gradients(queries, grads, keys, values, visible, lse_m, delta_m, scale_log2)
        dv_nd += product(p_nm.to(grads.dtype), grads)
        ds = ds_nm.to(queries.dtype)
        dk_nd += product(ds, queries)
        dq_md = product(ds.T, keys) * scale
        if FIRST_KEY > 0:
            dq_md += load_rows(dq, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        store_rows(dq, heads, valid, HEAD_DIM, dq_md, HEAD_DIM, BLOCK_D)
    store_rows(dk + g * HEAD_DIM, key_start + n, exists, G * HEAD_DIM, dk_nd * scale, HEAD_DIM, BLOCK_D)
    store_rows(dv + g * HEAD_DIM, key_start + n, exists, G * HEAD_DIM, dv_nd, HEAD_DIM, BLOCK_D)


@triton.jit
def differentiate_chosen(
    q, k, v, grad, lse, delta, dq, dk, dv, parts, order, items, rows, scale,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_KEY: tl.constexpr,
):  # fmt: skip
    """Add the gradients for attention to one chosen chunk per row to dq, dk and dv. Grid (items,).

    Args:
        parts: fp32 [parts, 2, BLOCK_N, d], written: dk and dv of the segments of chunks with several segments.
        items: int32 [items, ITEM_COLUMNS] from `cut_segments`.
    """
    item = items + tl.program_id(0) * ITEM_COLUMNS
    begin, end, g = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if begin < end:
        part = tl.load(item + 4)
        token = tl.load(item + 3) + FIRST_KEY + tl.arange(0, BLOCK_N)
        all_valid = token >= 0
        keys = load_rows(k + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        values = load_rows(v + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        dk_nd = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_nd = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        scale_log2 = scale * LOG2E
        for i in range(begin, end, BLOCK_M):
            m = i + tl.arange(0, BLOCK_M)
            valid = m < end
            row = tl.load(order + m, mask=valid, other=0)
            heads = head_rows(row, g, G, R)
            queries = load_rows(q, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
            grads = load_rows(grad, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
            index = g.to(tl.int64) * rows + row
            lse_m = tl.load(lse + index, mask=valid, other=0.0)
            delta_m = tl.load(delta + index, mask=valid, other=0.0)
            p_nm, ds_nm = _tile_gradients(queries, grads, keys, values, valid[None, :], lse_m, delta_m, scale_log2)
            dv_nd += product(p_nm.to(grads.dtype), grads)
            ds = ds_nm.to(queries.dtype)
            dk_nd += product(ds, queries)
            dq_md = product(ds.T, keys) * scale
            dq_md += load_rows(dq, heads, valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
            store_rows(dq, heads, valid, HEAD_DIM, dq_md, HEAD_DIM, BLOCK_D)
        dk_nd *= scale
        if part < 0:
            dk_nd += load_rows(dk + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            dv_nd += load_rows(dv + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            store_rows(dk + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, dk_nd, HEAD_DIM, BLOCK_D)
            store_rows(dv + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, dv_nd, HEAD_DIM, BLOCK_D)
        else:
            part_index = part.to(tl.int64) * (2 * BLOCK_N) + tl.arange(0, BLOCK_N)
            store_rows(parts, part_index, all_valid, HEAD_DIM, dk_nd, HEAD_DIM, BLOCK_D)
            store_rows(parts, part_index + BLOCK_N, all_valid, HEAD_DIM, dv_nd, HEAD_DIM, BLOCK_D)


@triton.jit
def add_parts(
    parts, part_ends, part_counts, dk, dv, table, slots,
    G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    FIRST_KEY: tl.constexpr,
):  # fmt: skip
    """Add the partial dk and dv of chunks with several segments, in order. Grid (bins, BLOCK_N / BLOCK_ROWS).

    Args:
        part_ends: int32 [bins], running sum of `part_counts`.
        part_counts: int32 [bins], number of the bin's segments in `parts`; 0 for bins with at most one segment.
    """
    bin = tl.program_id(0)
    count = tl.load(part_counts + bin)
    if count > 0:
        g, slot = bin // (slots + 1), bin % (slots + 1)
        n = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        all_valid = n >= 0
        token = tl.load(table + slot * COLUMNS) + FIRST_KEY + n
        first = tl.load(part_ends + bin) - count
        dk_nd = load_rows(dk + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D).to(tl.float32)
        dv_nd = load_rows(dv + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D).to(tl.float32)
        for i in range(count):
            part_index = (first + i).to(tl.int64) * (2 * BLOCK_N) + n
            dk_nd += load_rows(parts, part_index, all_valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
            dv_nd += load_rows(parts, part_index + BLOCK_N, all_valid, HEAD_DIM, HEAD_DIM, BLOCK_D)
        store_rows(dk + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, dk_nd, HEAD_DIM, BLOCK_D)
        store_rows(dv + g * HEAD_DIM, token, all_valid, G * HEAD_DIM, dv_nd, HEAD_DIM, BLOCK_D)
