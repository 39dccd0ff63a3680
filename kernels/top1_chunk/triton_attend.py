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
    mixed = tl.zeros([M, BLOCK_D], tl.float32)
    for j in range(0, seen, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        keys = load_rows(k, key_start + n, n < seen, STRIDE, HEAD_DIM, BLOCK_D)
        values = load_rows(v, key_start + n, n < seen, STRIDE, HEAD_DIM, BLOCK_D)
        scores = product(queries, keys.T) * scale_log2
        if CAUSAL:
            scores = tl.where((n < seen)[None, :] & (n[None, :] <= position[:, None]), scores, -float("inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        # If all scores are -inf, `top` is replaced, because -inf - -inf is NaN.
        level = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2(scores - level[:, None])
        decay = tl.exp2(highest - level)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None] + product(weights.to(values.dtype), values)
        highest = top
    # One division per row instead of per element, because a division takes about ten instructions.
    return mixed * (1.0 / tl.where(total > 0, total, 1.0))[:, None], highest + tl.log2(total)


@triton.jit
def shares(level_a, level_b):
    """Return the shares of two sets of keys, a and b, in their joint softmax, from their log-sum-exps [M].

    Returns:
        (share of a, share of b, log-sum-exp of both); 0, 0 and -inf if both log-sum-exps are -inf.
    """
    top = tl.maximum(level_a, level_b)
    level = tl.where(top == -float("inf"), 0.0, top)
    weight_a, weight_b = tl.exp2(level_a - level), tl.exp2(level_b - level)
    total = weight_a + weight_b
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    return weight_a * inverse, weight_b * inverse, level + tl.log2(total)


@triton.jit
def join(a, level_a, b, level_b):
    """Combine the attention to two sets of keys, each an output [M, BLOCK_D] with its log-sum-exp [M]."""
    share_a, share_b, level = shares(level_a, level_b)
    return a * share_a[:, None] + b * share_b[:, None], level
