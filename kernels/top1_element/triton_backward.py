"""Gradients of the selected value and of the softmax behind the selection, in Triton.

With p = exp2(s - lse), do the gradient of the output and j* the selected key, dv_j is the sum of do over the queries
that selected j. "straight_through": ds = p (do . v - delta), delta = do . (values weighted by p). "selected":
ds = delta (onehot - p), delta = do . v_j*. Then dq = scale * ds k and dk = scale * ds^T q. Tokens and ranges are those
of `triton_forward`. No program writes the output of another, so there are no atomics and sums have a fixed order.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import LOG2E, load_rows, product, store_rows
from kernels.top1_element.triton_forward import query_block


@triton.jit
def _add_to_queries(
    queries, grads, keys, values, visible, lse, delta, dq, scale_log2,
    MASKED: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq [M, D]: ds k, or p k if SELECTED."""
    weights = tl.exp2(product(queries, keys.T) * scale_log2 - lse[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    if not SELECTED:
        weights *= product(grads, values.T) - delta[:, None]
    return dq + product(weights.to(keys.dtype), keys)


@triton.jit
def differentiate_queries(
    q, k, v, grad, mixed, lse, delta, chosen, dq, first_key, own_key, num_tokens, length, blocks, scale,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Write dq and delta. Grid (rows of the batch * blocks, G * R).

    Tensors:
        q, grad, mixed, dq: [tokens, G * R, d]; mixed: the output if SELECTED, else the softmax-weighted values.
        k, v: [key tokens, G, d].
        lse, delta: fp32 [G * R, tokens]; delta is written.
        chosen: int32 [G * R, tokens], key tokens.
        first_key, own_key: int32 [tokens].

    Scalars:
        num_tokens: total number of query tokens.
        length: query tokens per batch row.
        blocks: blocks of BLOCK_M queries per batch row.
        scale: factor on q . k.
    """
    h = tl.program_id(1)
    valid, token, first, own, begin, common, end = query_block(first_key, own_key, length, blocks, BLOCK_M, BLOCK_N)
    queries = load_rows(q + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, HEAD_DIM, BLOCK_D)
    grads = load_rows(grad + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, HEAD_DIM, BLOCK_D)
    mixed_md = load_rows(mixed + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, HEAD_DIM, BLOCK_D)
    offset = h.to(tl.int64) * num_tokens + token
    delta_m = tl.sum(grads.to(tl.float32) * mixed_md.to(tl.float32), 1)
    tl.store(delta + offset, delta_m, mask=valid)
    lse_m = tl.load(lse + offset, mask=valid, other=0.0)

    dq_md = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale_log2 = scale * LOG2E
    k_g, v_g = k + h // R * HEAD_DIM, v + h // R * HEAD_DIM
    for MASKED in tl.static_range(2):
        for start in range(common if MASKED else begin, end if MASKED else common, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            keys = load_rows(k_g, n, n < end, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            values = keys
            if not SELECTED:
                values = load_rows(v_g, n, n < end, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
            visible = (n[None, :] >= first[:, None]) & (n[None, :] <= own[:, None])
            dq_md = _add_to_queries(
                queries, grads, keys, values, visible, lse_m, delta_m, dq_md, scale_log2, MASKED, SELECTED
            )
    if SELECTED:
        best = load_rows(k_g, tl.load(chosen + offset, mask=valid, other=0), valid, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        dq_md = delta_m[:, None] * (best - dq_md)
    store_rows(dq + h * HEAD_DIM, token, valid, G * R * HEAD_DIM, dq_md * scale, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_to_keys(
    q, grad, lse, delta, chosen, keys, values, key_token, visible, token, valid, offset, dk, dv, scale_log2,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Add one tile of one head's queries to dk and dv [N, D]. Tiles are [N, M], so dk and dv need no transpose."""
    queries = load_rows(q, token, valid, G * R * HEAD_DIM, HEAD_DIM, BLOCK_D)
    grads = load_rows(grad, token, valid, G * R * HEAD_DIM, HEAD_DIM, BLOCK_D)
    # Rows beyond the end are zero, including delta, and add nothing.
    lse_m = tl.load(lse + offset, mask=valid, other=0.0)
    delta_m = tl.load(delta + offset, mask=valid, other=0.0)
    chosen_m = tl.load(chosen + offset, mask=valid, other=-1)
    onehot = key_token[:, None] == chosen_m[None, :]
    dv += product(tl.where(onehot, 1.0, 0.0).to(grads.dtype), grads)
    p = tl.exp2(product(keys, queries.T) * scale_log2 - lse_m[None, :])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    if SELECTED:
        ds = delta_m[None, :] * (tl.where(onehot, 1.0, 0.0) - p)
    else:
        ds = p * (product(values, grads.T) - delta_m[None, :])
    dk += product(ds.to(queries.dtype), queries)
    return dk, dv


@triton.jit
def differentiate_keys(
    q, k, v, grad, lse, delta, chosen, dk, dv, first_query, end_query, num_tokens, length, blocks, scale,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Write dk and dv. Grid (rows of the batch * blocks, G).

    Tensors:
        q, grad: [tokens, G * R, d].
        k, v, dk, dv: [key tokens, G, d].
        lse, delta: fp32 [G * R, tokens].
        chosen: int32 [G * R, tokens], key tokens.
        first_query, end_query: int32 [key tokens].

    Scalars:
        num_tokens: total number of query tokens.
        length: keys per batch row.
        blocks: blocks of BLOCK_N keys per batch row.
        scale: factor on q . k.
    """
    program, g = tl.program_id(0), tl.program_id(1)
    row_start = program // blocks * length
    i = program % blocks * BLOCK_N
    n = i + tl.arange(0, BLOCK_N)
    exists, key_token = n < length, row_start + n
    first_n = tl.load(first_query + key_token, mask=exists, other=0)
    end_n = tl.load(end_query + key_token, mask=exists, other=0)
    keys = load_rows(k + g * HEAD_DIM, key_token, exists, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
    values = load_rows(v + g * HEAD_DIM, key_token, exists, G * HEAD_DIM, HEAD_DIM, BLOCK_D)

    last = row_start + tl.minimum(i + BLOCK_N, length) - 1
    begin, end = tl.load(first_query + row_start + i), tl.load(end_query + last)
    # From `common` on, queries see the whole block; at the boundary of two documents no query does.
    common = begin + tl.cdiv(tl.load(first_query + last) - begin, BLOCK_M) * BLOCK_M
    common = tl.where(tl.load(end_query + row_start + i) == end, tl.minimum(common, end), end)

    dk_nd = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_nd = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    scale_log2 = scale * LOG2E
    for r in range(R):
        h = g * R + r
        q_h, grad_h, row_h = q + h * HEAD_DIM, grad + h * HEAD_DIM, h.to(tl.int64) * num_tokens
        for MASKED in tl.static_range(1, -1, -1):
            for start in range(begin if MASKED else common, common if MASKED else end, BLOCK_M):
                token = start + tl.arange(0, BLOCK_M)
                visible = (token[None, :] >= first_n[:, None]) & (token[None, :] < end_n[:, None])
                dk_nd, dv_nd = _add_to_keys(
                    q_h, grad_h, lse, delta, chosen, keys, values, key_token, visible, token, token < end,
                    row_h + token, dk_nd, dv_nd, scale_log2, G, R, HEAD_DIM, BLOCK_D, MASKED, SELECTED,
                )  # fmt: skip
    store_rows(dk + g * HEAD_DIM, key_token, exists, G * HEAD_DIM, dk_nd * scale, HEAD_DIM, BLOCK_D)
    store_rows(dv + g * HEAD_DIM, key_token, exists, G * HEAD_DIM, dv_nd, HEAD_DIM, BLOCK_D)
