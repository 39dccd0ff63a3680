"""Attention of a tile of rows to the keys of one chunk, and the addressing of rows and slots.

R query heads share a key head. The queries of key head g are the rows of one matrix: row n * R + r is query head
g * R + r of token n. Table columns are those of `chunks`. Log-sum-exps are in units of log2.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import load_rows, product

COLUMNS = tl.constexpr(6)


@triton.jit
def head_rows(row, g, G: tl.constexpr, R: tl.constexpr):
    """Return the indices of key head g's rows `row` in queries [tokens * G * R, d]."""
    return (row // R).to(tl.int64) * (G * R) + g * R + row % R


@triton.jit
def first_slot(table, slot):
    """Return the first slot of the document of a slot; `slot` may be a scalar or a tile."""
    return tl.load(table + slot * COLUMNS + 5)


@triton.jit
def own_rows(table, slot, tile, R: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile of the rows whose queries are in a slot.

    Returns:
        (row [M], position in the chunk [M], valid [M], number of the chunk's keys visible to any of these rows).
    """
    entry = table + slot * COLUMNS
    start, count, shift = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    seen = tl.minimum(tl.load(entry + 1), shift + (tile * BLOCK_M + BLOCK_M - 1) // R + 1)
    return start * R + m, shift + m // R, m < count * R, seen


@triton.jit
def attend(
    queries, k, v, key_start, position, seen, scale_log2,
    CAUSAL: tl.constexpr, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to keys 0 .. seen - 1 of a chunk; with CAUSAL, row m attends to keys up to position[m].

    Args:
        queries: [M, BLOCK_D].
        k, v: pointers to the head's keys and values, rows STRIDE elements apart.
        key_start: first token of the chunk.

    Returns:
        (output [M, BLOCK_D] fp32, log-sum-exp [M]); 0 and -inf for a row without a visible key.
    """
    M: tl.constexpr = queries.shape[0]
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    for j in range(0, seen, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        keys = load_rows(k, key_start + n, n < seen, STRIDE, HEAD_DIM, BLOCK_D)
        values = load_rows(v, key_start + n, n < seen, STRIDE, HEAD_DIM, BLOCK_D)
        scores = product(queries, keys.T) * scale_log2
        if CAUSAL:
            scores = tl.where((n < seen)[None, :] & (n[None, :] <= position[:, None]), scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # If all scores are -inf, `new_highest` is replaced, because -inf - -inf is NaN.
        safe_highest = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        weights = tl.exp2(scores - safe_highest[:, None])
        decay = tl.exp2(highest - safe_highest)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + product(weights.to(values.dtype), values)
        highest = new_highest
    # One division per row instead of per element, because a division takes about ten instructions.
    return acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None], highest + tl.log2(total)


@triton.jit
def shares(lse_a, lse_b):
    """Return the shares of two sets of keys, a and b, in their joint softmax, from their log-sum-exps [M].

    Returns:
        (share of a, share of b, log-sum-exp of both); 0, 0 and -inf if both log-sum-exps are -inf.
    """
    highest = tl.maximum(lse_a, lse_b)
    safe_highest = tl.where(highest == -float("inf"), 0.0, highest)
    weight_a, weight_b = tl.exp2(lse_a - safe_highest), tl.exp2(lse_b - safe_highest)
    total = weight_a + weight_b
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    return weight_a * inverse, weight_b * inverse, safe_highest + tl.log2(total)


@triton.jit
def join(a, lse_a, b, lse_b):
    """Combine the attention to two sets of keys, each an output [M, BLOCK_D] with its log-sum-exp [M]."""
    share_a, share_b, lse = shares(lse_a, lse_b)
    return a * share_a[:, None] + b * share_b[:, None], lse
