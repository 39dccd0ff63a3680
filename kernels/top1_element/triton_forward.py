"""The best key, its value, and what the gradient needs of the softmax, in one pass over the keys, in Triton.

Tokens are flat and visible keys are ranges, see `ranges`. R query heads share a key head. Logsumexps are in units of
log2. Nothing of [queries, keys] reaches memory.
"""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import triton
import triton.language as tl

from kernels.triton_math import MAX_INT32, load_rows, product, store_rows


@triton.jit
def query_block(
    first_key, own_key, length, blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The block of queries of program 0 along the grid's first axis, and the keys that it sees.

    Returns:
        valid, token: [M], whether a query exists, and its flat token.
        first, own: [M], the keys it sees, inclusive.
        begin, common, end: keys begin .. common - 1 are whole tiles that the whole block sees; end: of what any sees.
    """
    program = tl.program_id(0)
    row_start = program // blocks * length
    # The last queries see most keys: they begin first.
    i = (blocks - 1 - program % blocks) * BLOCK_M
    m = i + tl.arange(0, BLOCK_M)
    valid, token = m < length, row_start + m
    first = tl.load(first_key + token, mask=valid, other=0)
    own = tl.load(own_key + token, mask=valid, other=-1)
    last = row_start + tl.minimum(i + BLOCK_M, length) - 1
    begin, end = tl.load(first_key + row_start + i), tl.load(own_key + last) + 1
    whole = (tl.load(own_key + row_start + i) + 1 - begin) // BLOCK_N * BLOCK_N
    # Where documents meet in the block, no key is seen by all.
    common = begin + tl.where(tl.load(first_key + last) == begin, whole, 0)
    return valid, token, first, own, begin, common, end


@triton.jit
def _take_keys(
    queries, keys, values, start, visible, best, at, total, mixed, scale_log2,
    MASKED: tl.constexpr, SUM: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Take the tile of keys that begins at `start` into each row's best key and running softmax.

    Tensors:
        visible: bool [M, N], looked at where MASKED.
        best, at: [M], highest product so far (unscaled: scaling could round two to one) and its key.
        total: [M], sum of the softmax weights relative to the best, where SUM.
        mixed: [M, D], sum of the values by those weights, where SOFT.
    """
    products = product(queries, keys.T)
    if MASKED:
        products = tl.where(visible, products, -float("inf"))
    highest = tl.max(products, 1)
    n = tl.arange(0, products.shape[1])[None, :]
    first = tl.min(tl.where(products == highest[:, None], n, MAX_INT32), 1)
    # Strictly: of equals in two tiles the earlier stays. Never so for NaN, so `at` remains a visible key.
    better = highest > best
    top = tl.where(better, highest, best)
    at = tl.where(better, start + first, at)
    if SUM:
        # A row that sees nothing yet is at -inf; calculating with that would give NaN.
        level = tl.where(top == -float("inf"), 0.0, top) * scale_log2
        weights = tl.exp2(products * scale_log2 - level[:, None])
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
        decay = tl.where(best == -float("inf"), 0.0, tl.exp2((best - top) * scale_log2))
        total = total * decay + tl.sum(weights, 1)
        if SOFT:
            mixed = mixed * decay[:, None] + product(weights.to(values.dtype), values)
    return top, at, total, mixed


@triton.jit
def attend(
    q, k, v, out, soft, lse, chosen, first_key, own_key, num_tokens, length, blocks, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Choose every query's best key and take its value. Grid (rows of the batch * blocks, G * R).

    Tensors:
        q: queries [tokens, G * R, d].
        k, v: keys and values [key tokens, G, d].
        out: [tokens, G * R, d], out.
        soft: the same, out where SOFT: the values mixed by softmax.
        lse: fp32 [G * R, tokens], out where SUM.
        chosen: int32 [G * R, tokens], out: key tokens.
        first_key, own_key: int32 [tokens].

    Numbers:
        num_tokens: query tokens in all.
        length: of them in a row of the batch.
        blocks: blocks of BLOCK_M queries that a row is cut into.
        scale_log2: scale / ln 2.
    """
    h = tl.program_id(1)
    valid, token, first, own, begin, common, end = query_block(first_key, own_key, length, blocks, BLOCK_M, BLOCK_N)
    queries = load_rows(q + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, HEAD_DIM, BLOCK_D)
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    at = first
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
            best, at, total, mixed = _take_keys(
                queries, keys, values, start, visible, best, at, total, mixed, scale_log2, MASKED, SUM, SOFT
            )
    taken = load_rows(v_g, at, valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
    store_rows(out + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, taken, HEAD_DIM, BLOCK_D)
    place = h.to(tl.int64) * num_tokens + token
    tl.store(chosen + place, at, mask=valid)
    if SUM:
        tl.store(lse + place, best * scale_log2 + tl.log2(total), mask=valid)
    if SOFT:
        mixed = mixed / tl.where(valid, total, 1.0)[:, None]
        store_rows(soft + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, mixed, HEAD_DIM, BLOCK_D)
