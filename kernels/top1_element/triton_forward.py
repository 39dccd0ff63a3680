"""Select the best key, load its value and compute the softmax statistics for the gradient in one pass, in Triton.

Tokens are flat and visible keys are ranges, see `ranges`. R query heads share a key head. Log-sum-exps are in units of
log2. No [queries, keys] array is written to memory.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import MAX_INT32, load_rows, product, store_rows


@triton.jit
def query_block(
    first_key, own_key, length, blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the program's block of queries, and the keys that it sees.

    Returns:
        valid, token: [M], mask of existing queries, and their flat tokens.
        first, own: [M], first and last visible key.
        begin, common, end: keys begin .. common - 1 are complete tiles that every query sees; keys begin .. end - 1
            contain all keys that any query sees.
    """
    program = tl.program_id(0)
    row_start = program // blocks * length
    # The last queries see the most keys, so their programs start first.
    i = (blocks - 1 - program % blocks) * BLOCK_M
    m = i + tl.arange(0, BLOCK_M)
    valid, token = m < length, row_start + m
    first = tl.load(first_key + token, mask=valid, other=0)
    own = tl.load(own_key + token, mask=valid, other=-1)
    last = row_start + tl.minimum(i + BLOCK_M, length) - 1
    begin, end = tl.load(first_key + row_start + i), tl.load(own_key + last) + 1
    num_common = (tl.load(own_key + row_start + i) + 1 - begin) // BLOCK_N * BLOCK_N
    # If the block contains a document boundary, no key is visible to all queries.
    common = begin + tl.where(tl.load(first_key + last) == begin, num_common, 0)
    return valid, token, first, own, begin, common, end


@triton.jit
def _update_best_key(
    queries, keys, values, start, visible, best, best_key, total, mixed, scale_log2,
    MASKED: tl.constexpr, SUM: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Update each row's best key and running softmax with the tile of keys that begins at `start`.

    Tensors:
        visible: bool [M, N], used if MASKED.
        best, best_key: [M], highest product so far and its key. Products are unscaled, because scaling could round
            two to the same value.
        total: [M], sum of the softmax weights relative to that of the best key, if SUM.
        mixed: [M, D], sum of the values times these weights, if SOFT.
    """
    products = product(queries, keys.T)
    if MASKED:
        products = tl.where(visible, products, -float("inf"))
    highest = tl.max(products, 1)
    n = tl.arange(0, products.shape[1])[None, :]
    first = tl.min(tl.where(products == highest[:, None], n, MAX_INT32), 1)
    # A strict comparison keeps the earlier of equal keys. It is false for NaN, so `best_key` remains a visible key.
    better = highest > best
    top = tl.where(better, highest, best)
    best_key = tl.where(better, start + first, best_key)
    if SUM:
        # A row without a visible key so far is at -inf, and arithmetic with -inf would give NaN.
        level = tl.where(top == -float("inf"), 0.0, top) * scale_log2
        weights = tl.exp2(products * scale_log2 - level[:, None])
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
        decay = tl.where(best == -float("inf"), 0.0, tl.exp2((best - top) * scale_log2))
        total = total * decay + tl.sum(weights, 1)
        if SOFT:
            mixed = mixed * decay[:, None] + product(weights.to(values.dtype), values)
    return top, best_key, total, mixed


@triton.jit
def attend(
    q, k, v, out, soft, lse, chosen, first_key, own_key, num_tokens, length, blocks, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Select every query's best key and write its value. Grid (rows of the batch * blocks, G * R).

    Tensors:
        q: queries [tokens, G * R, d].
        k, v: keys and values [key tokens, G, d].
        out: [tokens, G * R, d], written.
        soft: [tokens, G * R, d], written if SOFT: the softmax-weighted values.
        lse: fp32 [G * R, tokens], written if SUM.
        chosen: int32 [G * R, tokens], written: key tokens.
        first_key, own_key: int32 [tokens].

    Scalars:
        num_tokens: total number of query tokens.
        length: query tokens per batch row.
        blocks: blocks of BLOCK_M queries per batch row.
        scale_log2: scale / ln 2.
    """
    h = tl.program_id(1)
    valid, token, first, own, begin, common, end = query_block(first_key, own_key, length, blocks, BLOCK_M, BLOCK_N)
    queries = load_rows(q + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, HEAD_DIM, BLOCK_D)
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    best_key = first
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_g, v_g = k + h // R * HEAD_DIM, v + h // R * HEAD_DIM
    for MASKED in tl.static_range(2):
        for start in range(common if MASKED else begin, end if MASKED else common, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            keys = load_rows(k_g, n, n < end, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            values = keys
            if SOFT:
                values = load_rows(v_g, n, n < end, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            visible = (n[None, :] >= first[:, None]) & (n[None, :] <= own[:, None])
            best, best_key, total, mixed = _update_best_key(
                queries, keys, values, start, visible, best, best_key, total, mixed, scale_log2, MASKED, SUM, SOFT
            )
    best_value = load_rows(v_g, best_key, valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
    store_rows(out + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, best_value, HEAD_DIM, BLOCK_D)
    offset = h.to(tl.int64) * num_tokens + token
    tl.store(chosen + offset, best_key, mask=valid)
    if SUM:
        tl.store(lse + offset, best * scale_log2 + tl.log2(total), mask=valid)
    if SOFT:
        mixed = mixed / tl.where(valid, total, 1.0)[:, None]
        store_rows(soft + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, mixed, HEAD_DIM, BLOCK_D)
