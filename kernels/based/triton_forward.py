"""Based's linear attention in chunks, in Triton.

With s = q.k / sqrt(f), the weight 1 + s + s^2 / 2 is an inner product of features of q and k: a constant 1, the
elements of the vector, and their pairwise products (`kernels.based.features`). All earlier chunks are therefore
summarised by a state, the sum of features times values. Only pairs within a chunk are computed one by one, with weight
(1 + s)^2 / 2 + 1/2.

Features are never written to memory, because they are about ten times as wide as a token. The features that contain
element i of a token are its elements times element i, so each i needs one small product with rows of the state
(`triton_tile`). `sum_chunks` computes the contribution of each chunk, `accumulate_chunks` the state before each chunk,
`read_chunks` the output.

Products with intermediate results are computed in TF32, and products of two inputs in the inputs' dtype. If weights,
their gradients and sums were rounded to 16 bits, as in flash-linear-attention, gradients would be off by 5e-3 and more.
Kernels have 2 warps, fewer than Hopper's wgmma needs, because wgmma gave wrong results for narrow tiles (see
`kernels.gated_delta_rule.triton_forward`).
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
    state_rows,
    token_indices,
)
from kernels.common.triton_math import load_rows, product, product_tf32, store_rows


@triton.jit
def sum_chunks(
    x, y, sums, neg_deltas, states, length, chunks, root, sample_stride, time_stride,
    H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr, LEFTS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Sum the features of x times y within each chunk. Grid (blocks of W + 2, chunks, samples * H).

    Tensors, one row per token:
        x: [rows, H, W], keys; queries if GRADIENT.
        y: [rows, H, E], values; if GRADIENT, the gradient of the output, which is divided by the sums of weights here.
        sums, neg_deltas: fp32 [rows, H], see `triton_backward`; read only if GRADIENT.
        states: fp32 [samples * H, chunks, F * (E + 1)], written.
    """
    chunk, sequence = tl.program_id(1), tl.program_id(2)
    j, e = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_E)
    left = tl.program_id(0) * LEFTS + tl.arange(0, LEFTS)
    total_ce, total_c = tl.zeros([LEFTS * BLOCK_W, BLOCK_E], tl.float32), tl.zeros([LEFTS * BLOCK_W], tl.float32)
    for first in range(chunk * C, tl.minimum(chunk * C + C, length), T):
        index, valid = token_indices(first + tl.arange(0, T), sequence, length, sample_stride, time_stride, H)
        y_te = load_rows(y, index, valid, E, E, BLOCK_E).to(tl.float32)
        x_tw = load_rows(x, index, valid, W, W, BLOCK_W).to(tl.float32) * root
        left_tl = load_element(x, index[:, None], valid[:, None], left[None, :], root, W)
        if GRADIENT:
            inverse, y_weight = load_factors(sums, neg_deltas, index, valid)
            left_tl *= inverse[:, None]
        else:
            y_weight = valid.to(tl.float32)
        x_tlw = tl.where((left <= W)[None, :, None], x_tw[:, None, :], 1.0) * left_tl[:, :, None]
        x_tc = tl.reshape(x_tlw, [T, LEFTS * BLOCK_W])
        total_ce += product_tf32(tl.trans(x_tc), y_te)
        total_c += tl.sum(x_tc * y_weight[:, None], 0)
    state = states + (sequence.to(tl.int64) * chunks + chunk) * F * (E + 1)
    row = state_rows(left[:, None], j[None, :], W)
    is_pair = (left[:, None] <= j[None, :]) | (left == W)[:, None]
    is_constant = (left == W + 1)[:, None] & (j == 0)[None, :]
    is_written = tl.reshape((is_pair & (j < W)[None, :]) | is_constant, [LEFTS * BLOCK_W])
    row = tl.reshape(row, [LEFTS * BLOCK_W])
    tl.store(state + row[:, None] * E + e[None, :], total_ce, mask=is_written[:, None] & (e < E)[None, :])
    tl.store(state + F * E + row, total_c, mask=is_written)


@triton.jit
def accumulate_chunks(states, chunks, SIZE: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """Replace each chunk's contribution by the sum over all earlier or later chunks. Grid (blocks of SIZE, states).

    Tensors:
        states: fp32 [..., chunks, SIZE], updated in place.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1).to(tl.int64) * chunks + (chunks - 1 if REVERSE else 0)
    pointers, running_sum = states + first * SIZE + i, tl.zeros([BLOCK], tl.float32)
    for _ in range(chunks):
        contribution = tl.load(pointers, mask=i < SIZE, other=0.0)
        tl.store(pointers, running_sum, mask=i < SIZE)
        running_sum += contribution
        pointers += -SIZE if REVERSE else SIZE


@triton.jit
def read_chunks(
    q, k, v, states, out, sums, length, chunks, root, sample_stride, time_stride,
    H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write the output and the sums of weights. Grid (tiles of tokens, samples * H).

    Tensors as in `sum_chunks`, and:
        q, k: [rows, H, W].
        v: [rows, H, E].
        states: state before each chunk.
        out: [rows, H, E], written.
        sums: fp32 [rows, H], written.
    """
    i, sequence = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    chunk = tl.program_id(0) * T // C
    index, valid = token_indices(i, sequence, length, sample_stride, time_stride, H)
    q_tw = load_rows(q, index, valid, W, W, BLOCK_W)
    scaled_tw = q_tw.to(tl.float32) * root
    state = states + (sequence.to(tl.int64) * chunks + chunk) * F * (E + 1)
    out_te, sum_t = load_constant_row(state, E, F, BLOCK_E)
    out_te, sum_t = out_te[None, :] + tl.zeros([T, BLOCK_E], tl.float32), sum_t + tl.zeros([T], tl.float32)
    for left in range(0, tl.where(chunk > 0, W + 1, 0)):
        rows_we, weights_w = load_state_rows(state, left, W, E, F, BLOCK_W, BLOCK_E)
        features_tw = scaled_tw * (load_element(q, index, valid, left, root, W) * tl.where(left < W, 0.5, 1.0))[:, None]
        out_te += product_tf32(features_tw, rows_we)
        sum_t += tl.sum(features_tw * weights_w[None, :], 1)
    for first in range(chunk * C, tl.program_id(0) * T + 1, T):
        j = first + tl.arange(0, T)
        index_j, valid_j = token_indices(j, sequence, length, sample_stride, time_stride, H)
        k_jw = load_rows(k, index_j, valid_j, W, W, BLOCK_W)
        v_je = load_rows(v, index_j, valid_j, E, E, BLOCK_E).to(tl.float32)
        score = 1.0 + product(q_tw, tl.trans(k_jw)) * (root * root)
        weight = tl.where(i[:, None] >= j[None, :], 0.5 * score * score + 0.5, 0.0)
        out_te += product_tf32(weight, v_je)
        sum_t += tl.sum(weight, 1)
    store_rows(out, index, valid, E, out_te / sum_t[:, None], E, BLOCK_E)
    tl.store(sums + index, sum_t, mask=valid)
