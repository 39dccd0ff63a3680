"""Gradients of Based's linear attention, in Triton. The forward pass is in `triton_forward`.

With z the sum of a token's weights w, the token's output is o = sum w v / z. The gradient of a weight is (do.v - do.o)
/ z, and its gradient with respect to s has the factor 1 + s. For dq, the states before each chunk are recomputed. For
dk and dv, the states are sums over all later chunks of the features of q times do / z. The code calls the term -do.o a
token's `neg_delta`.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.based.triton_tile import (
    load_constant_row,
    load_element,
    load_factors,
    load_state_rows,
    token_indices,
)
from kernels.common.triton_math import load_rows, product, product_tf32, store_rows


@triton.jit
def write_neg_deltas(dout, out, neg_deltas, num_rows, E: tl.constexpr, BLOCK_E: tl.constexpr, T: tl.constexpr):
    """Write -do.o for each token and head. Grid (tiles of rows).

    Tensors:
        dout: [num_rows, E], gradient of the output.
        out: [num_rows, E], the output.
        neg_deltas: fp32 [num_rows], written.
    """
    index = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    valid = index < num_rows
    dout_te = load_rows(dout, index, valid, E, E, BLOCK_E).to(tl.float32)
    out_te = load_rows(out, index, valid, E, E, BLOCK_E).to(tl.float32)
    tl.store(neg_deltas + index, -tl.sum(dout_te * out_te, 1), mask=valid)


@triton.jit
def write_query_gradients(
    dout, q, k, v, sums, neg_deltas, states, dq, length, chunks, root, sample_stride, time_stride,
    H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write dq [rows, H, W]. Grid (tiles of tokens, samples * H).

    Tensors as in `triton_forward.read_chunks`, and:
        dout: [rows, H, E], gradient of the output.
        neg_deltas: output of `write_neg_deltas`.
    """
    i, sequence = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    chunk = tl.program_id(0) * T // C
    index, valid = token_indices(i, sequence, length, sample_stride, time_stride, H)
    q_tw = load_rows(q, index, valid, W, W, BLOCK_W)
    dout_te = load_rows(dout, index, valid, E, E, BLOCK_E)
    inverse, neg_delta = load_factors(sums, neg_deltas, index, valid)
    dq_tw = tl.zeros([T, BLOCK_W], tl.float32)
    state = states + (sequence.to(tl.int64) * chunks + chunk) * F * (E + 1)
    for left in range(0, tl.where(chunk > 0, W + 1, 0)):
        rows_we, weights_w = load_state_rows(state, left, W, E, F, BLOCK_W, BLOCK_E)
        dfeatures = product_tf32(dout_te.to(tl.float32), tl.trans(rows_we)) + neg_delta[:, None] * weights_w[None, :]
        dq_tw += load_element(q, index, valid, left, root, W)[:, None] * dfeatures
    for first in range(chunk * C, tl.program_id(0) * T + 1, T):
        j = first + tl.arange(0, T)
        index_j, valid_j = token_indices(j, sequence, length, sample_stride, time_stride, H)
        k_jw = load_rows(k, index_j, valid_j, W, W, BLOCK_W)
        v_je = load_rows(v, index_j, valid_j, E, E, BLOCK_E)
        score = 1.0 + product(q_tw, tl.trans(k_jw)) * (root * root)
        dweight = product(dout_te, tl.trans(v_je)) + neg_delta[:, None]
        dscore = tl.where(i[:, None] >= j[None, :], dweight * score, 0.0)
        dq_tw += product_tf32(dscore, k_jw.to(tl.float32)) * root
    store_rows(dq, index, valid, W, dq_tw * (root * inverse)[:, None], W, BLOCK_W)


@triton.jit
def write_key_value_gradients(
    dout, q, k, v, sums, neg_deltas, states, dk, dv, length, chunks, root, sample_stride, time_stride,
    H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write dk [rows, H, W] and dv [rows, H, E]. Grid (tiles of tokens, samples * H).

    Tensors as in `write_query_gradients`, but:
        states: sums over all later chunks.
    """
    j, sequence = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    chunk = tl.program_id(0) * T // C
    index, valid = token_indices(j, sequence, length, sample_stride, time_stride, H)
    k_tw = load_rows(k, index, valid, W, W, BLOCK_W)
    v_te = load_rows(v, index, valid, E, E, BLOCK_E)
    state = states + (sequence.to(tl.int64) * chunks + chunk) * F * (E + 1)
    constant_e, _ = load_constant_row(state, E, F, BLOCK_E)
    dk_tw, dv_te = tl.zeros([T, BLOCK_W], tl.float32), constant_e[None, :] + tl.zeros([T, BLOCK_E], tl.float32)
    for left in range(0, tl.where(chunk < chunks - 1, W + 1, 0)):
        rows_we, weights_w = load_state_rows(state, left, W, E, F, BLOCK_W, BLOCK_E)
        left_t = load_element(k, index, valid, left, root, W)
        dk_tw += left_t[:, None] * (product_tf32(v_te.to(tl.float32), tl.trans(rows_we)) + weights_w[None, :])
        factor_t = left_t * tl.where(left < W, 0.5, 1.0) * root
        dv_te += product_tf32(k_tw.to(tl.float32) * factor_t[:, None], rows_we)
    for first in range(tl.program_id(0) * T, tl.minimum(chunk * C + C, length), T):
        i = first + tl.arange(0, T)
        index_i, valid_i = token_indices(i, sequence, length, sample_stride, time_stride, H)
        q_iw = load_rows(q, index_i, valid_i, W, W, BLOCK_W)
        dout_ie = load_rows(dout, index_i, valid_i, E, E, BLOCK_E)
        inverse, neg_delta = load_factors(sums, neg_deltas, index_i, valid_i)
        score = 1.0 + product(k_tw, tl.trans(q_iw)) * (root * root)
        seen = tl.where(i[None, :] >= j[:, None], inverse[None, :], 0.0)
        dv_te += product_tf32(seen * (0.5 * score * score + 0.5), dout_ie.to(tl.float32))
        dweight = product(v_te, tl.trans(dout_ie)) + neg_delta[None, :]
        dk_tw += product_tf32(seen * dweight * score, q_iw.to(tl.float32)) * root
    store_rows(dk, index, valid, W, dk_tw * root, W, BLOCK_W)
    store_rows(dv, index, valid, E, dv_te, E, BLOCK_E)
