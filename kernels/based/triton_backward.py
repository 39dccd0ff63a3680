"""Gradients of Based's linear attention, in Triton. The forward pass is in `triton_forward`.

With z the sum of a token's weights w, the token's output is o = sum w v / z. The gradient of a weight is (do.v - do.o)
/ z, and its gradient with respect to s has the factor 1 + s. For dq, the states before each chunk are recomputed. For
dk and dv, the states are sums over all later chunks of the features of q times do / z. The code calls the term -do.o a
token's `fall`.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.based.triton_tile import (
    load_factors,
    load_left,
    load_state_alone,
    load_state_rows,
    place_tokens,
)
from kernels.common.triton_math import load_rows, product, product_tf32, store_rows


@triton.jit
def find_falls(dout, out, falls, num_rows, E: tl.constexpr, BLOCK_E: tl.constexpr, T: tl.constexpr):
    """Write -do.o for each token and head. Grid (tiles of rows).

    Tensors:
        dout: [num_rows, E], gradient of the output.
        out: [num_rows, E], the output.
        falls: fp32 [num_rows], written.
    """
    at = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    valid = at < num_rows
    dout_te = load_rows(dout, at, valid, E, E, BLOCK_E).to(tl.float32)
    out_te = load_rows(out, at, valid, E, E, BLOCK_E).to(tl.float32)
    tl.store(falls + at, -tl.sum(dout_te * out_te, 1), mask=valid)


@triton.jit
def write_query_gradients(
    dout, q, k, v, sums, falls, states, dq, length, chunks, root, sample_stride, time_stride,
    H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write dq [rows, H, W]. Grid (tiles of tokens, samples * H).

    Tensors as in `triton_forward.read_chunks`, and:
        dout: [rows, H, E], gradient of the output.
        falls: output of `find_falls`.
    """
    i, place = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    chunk = tl.program_id(0) * T // C
    at, valid = place_tokens(i, place, length, sample_stride, time_stride, H)
    q_tw = load_rows(q, at, valid, W, W, BLOCK_W)
    dout_te = load_rows(dout, at, valid, E, E, BLOCK_E)
    inverse, fall = load_factors(sums, falls, at, valid)
    dq_tw = tl.zeros([T, BLOCK_W], tl.float32)
    state = states + (place.to(tl.int64) * chunks + chunk) * F * (E + 1)
    for left in range(0, tl.where(chunk > 0, W + 1, 0)):
        rows_we, weights_w = load_state_rows(state, left, W, E, F, BLOCK_W, BLOCK_E)
        dfeatures = product_tf32(dout_te.to(tl.float32), tl.trans(rows_we)) + fall[:, None] * weights_w[None, :]
        dq_tw += load_left(q, at, valid, left, root, W)[:, None] * dfeatures
    for first in range(chunk * C, tl.program_id(0) * T + 1, T):
        j = first + tl.arange(0, T)
        at_j, valid_j = place_tokens(j, place, length, sample_stride, time_stride, H)
        k_jw = load_rows(k, at_j, valid_j, W, W, BLOCK_W)
        v_je = load_rows(v, at_j, valid_j, E, E, BLOCK_E)
        score = 1.0 + product(q_tw, tl.trans(k_jw)) * (root * root)
        dweight = product(dout_te, tl.trans(v_je)) + fall[:, None]
        dscore = tl.where(i[:, None] >= j[None, :], dweight * score, 0.0)
        dq_tw += product_tf32(dscore, k_jw.to(tl.float32)) * root
    store_rows(dq, at, valid, W, dq_tw * (root * inverse)[:, None], W, BLOCK_W)


@triton.jit
def write_key_value_gradients(
    dout, q, k, v, sums, falls, states, dk, dv, length, chunks, root, sample_stride, time_stride,
    H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write dk [rows, H, W] and dv [rows, H, E]. Grid (tiles of tokens, samples * H).

    Tensors as in `write_query_gradients`, but:
        states: sums over all later chunks.
    """
    j, place = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    chunk = tl.program_id(0) * T // C
    at, valid = place_tokens(j, place, length, sample_stride, time_stride, H)
    k_tw = load_rows(k, at, valid, W, W, BLOCK_W)
    v_te = load_rows(v, at, valid, E, E, BLOCK_E)
    state = states + (place.to(tl.int64) * chunks + chunk) * F * (E + 1)
    alone_e, _ = load_state_alone(state, E, F, BLOCK_E)
    dk_tw, dv_te = tl.zeros([T, BLOCK_W], tl.float32), alone_e[None, :] + tl.zeros([T, BLOCK_E], tl.float32)
    for left in range(0, tl.where(chunk < chunks - 1, W + 1, 0)):
        rows_we, weights_w = load_state_rows(state, left, W, E, F, BLOCK_W, BLOCK_E)
        left_t = load_left(k, at, valid, left, root, W)
        dk_tw += left_t[:, None] * (product_tf32(v_te.to(tl.float32), tl.trans(rows_we)) + weights_w[None, :])
        factor_t = left_t * tl.where(left < W, 0.5, 1.0) * root
        dv_te += product_tf32(k_tw.to(tl.float32) * factor_t[:, None], rows_we)
    for first in range(tl.program_id(0) * T, tl.minimum(chunk * C + C, length), T):
        i = first + tl.arange(0, T)
        at_i, valid_i = place_tokens(i, place, length, sample_stride, time_stride, H)
        q_iw = load_rows(q, at_i, valid_i, W, W, BLOCK_W)
        dout_ie = load_rows(dout, at_i, valid_i, E, E, BLOCK_E)
        inverse, fall = load_factors(sums, falls, at_i, valid_i)
        score = 1.0 + product(k_tw, tl.trans(q_iw)) * (root * root)
        seen = tl.where(i[None, :] >= j[:, None], inverse[None, :], 0.0)
        dv_te += product_tf32(seen * (0.5 * score * score + 0.5), dout_ie.to(tl.float32))
        dweight = product(v_te, tl.trans(dout_ie)) + fall[None, :]
        dk_tw += product_tf32(seen * dweight * score, q_iw.to(tl.float32)) * root
    store_rows(dk, at, valid, W, dk_tw * root, W, BLOCK_W)
    store_rows(dv, at, valid, E, dv_te, E, BLOCK_E)
