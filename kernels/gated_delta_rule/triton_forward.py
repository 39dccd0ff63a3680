"""Chunked gated delta rule, in Triton.

For the tokens i of a chunk with k, q and v, let S be the state before the chunk, G the running sum of g within the
chunk, and x_i = v_i - e^(G_i) S^T k_i the value error of token i. The updates u solve a triangular system:

    u = (1 + M)^-1 (beta x),  M_ij = beta_i e^(G_i - G_j) k_i.k_j for j < i
    o_i = scale (e^(G_i) S^T q_i + sum_{j<=i} e^(G_i - G_j) (q_i.k_j) u_j)
    S <- e^G S + sum_i e^(G - G_i) k_i u_i^T, with G that of the last token

`solve_chunks` inverts 1 + M, `multiply_pairs` computes the factors of u_j, `scan_chunks` scans over the chunks,
`read_states` computes o. The usual WY form multiplies the inverse with beta k and beta v before the scan. Here the scan
multiplies the inverse with beta x. This costs one more product per chunk, but only x and the off-diagonal part of the
inverse are rounded to 16 bits. Errors are two thirds of those of the usual form.

Hopper's wgmma instructions gave wrong results in these kernels, or read out of bounds, if a tile was narrower than 64
or a left operand was modified after its load. Triton uses wgmma for at least 4 warps and 64 rows in the left operand.
The scans avoid wgmma by a left operand of at most 32 rows (the value columns). The other kernels have either 2 warps,
which avoids wgmma, or tiles wide enough for it.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import LOG2E, load_rows, load_token_scalars, product, store_rows
from kernels.gated_delta_rule.triton_tile import (
    column_offsets,
    load_log_decays,
    mask_and_decay,
    rows_of_chunk,
    scan_position,
    split_program,
    transposed_column_offsets,
    unit_lower_inverse,
)


@triton.jit
def solve_chunks(
    k, beta, g, inverses, log_decays, length, chunks,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr,
):  # fmt: skip
    """Invert 1 + M of each chunk, and store the part of the inverse below the diagonal. Grid (samples * H * chunks).

    Tensors:
        k: [samples, length, H, D].
        beta, g: fp32 [samples, length, H].
        inverses: [samples, H, chunks, C, C] in k's dtype, written.
        log_decays: fp32 [samples, length, H], written: running sum of g within the chunk, in units of log2.
    """
    sample, head, chunk = split_program(tl.program_id(0), chunks, H)
    rows, valid = rows_of_chunk(sample, chunk, length, C)
    i = tl.arange(0, C)
    k_id = load_rows(k + head * D, rows, valid, H * D, D, BLOCK_D)
    beta_i = load_token_scalars(beta, rows, valid, head, H)
    log_decay = tl.zeros([C], tl.float32)
    if DECAYS:
        log_decay = tl.cumsum(load_token_scalars(g, rows, valid, head, H), 0) * LOG2E
        tl.store(log_decays + rows * H + head, log_decay, mask=valid)
    pairs = mask_and_decay(product(k_id, tl.trans(k_id)), log_decay, True, DECAYS, C)
    inverse = unit_lower_inverse(beta_i[:, None] * pairs, C)
    lower_inverse = tl.where(i[:, None] > i[None, :], inverse, 0.0)
    store_rows(inverses + tl.program_id(0).to(tl.int64) * C * C, i, i >= 0, C, lower_inverse, C, C)


@triton.jit
def multiply_pairs(
    x, y, out, log_decays, length, chunks, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
    STRICT: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Write scale e^(G_i - G_j) x_i.y_j for the token pairs j <= i of each chunk. Grid (samples * H * chunks).

    Tensors as in `solve_chunks`, and:
        x, y: [samples, length, H, D].
        out: [samples, H, chunks, C, C] in x's dtype, written.

    With STRICT, the products of j = i are 0.
    """
    sample, head, chunk = split_program(tl.program_id(0), chunks, H)
    rows, valid = rows_of_chunk(sample, chunk, length, C)
    pairs = tl.zeros([C, C], tl.float32)
    for first_d in range(0, D, BLOCK_D):
        d = first_d + tl.arange(0, BLOCK_D)
        token_mask, token_offsets = column_offsets(rows, valid, d, head, H, D)
        x_id = tl.load(x + token_offsets, mask=token_mask, other=0.0)
        y_id = tl.load(y + token_offsets, mask=token_mask, other=0.0)
        pairs += product(x_id, tl.trans(y_id))
    log_decay, _ = load_log_decays(log_decays, sample, chunk, length, head, H, C, DECAYS)
    pairs = mask_and_decay(pairs * scale, log_decay, STRICT, DECAYS, C)
    i = tl.arange(0, C)
    store_rows(out + tl.program_id(0).to(tl.int64) * C * C, i, i >= 0, C, pairs, C, C)


@triton.jit
def scan_chunks(
    k, v, beta, log_decays, inverses, initial_state, states, updates, final_state, length, chunks,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr,
):  # fmt: skip
    """Scan over the chunks. Grid (blocks of E, samples * H).

    Tensors as in `solve_chunks`, and:
        v: [samples, length, H, E].
        initial_state: fp32 [samples, H, D, E], the state before the first token.
        states: [samples, H, chunks, D, E] in k's dtype, written: the state before each chunk.
        updates: [samples, length, H, E], written: u.
        final_state: fp32 [samples, H, D, E], written: the final state.
    """
    sequence, sample, head, e, state_mask, state_offsets = scan_position(H, D, E, BLOCK_D, BLOCK_E)
    i = tl.arange(0, C)
    state = tl.load(initial_state + sequence * D * E + state_offsets, mask=state_mask, other=0.0)
    for chunk in range(chunks):
        rows, valid = rows_of_chunk(sample, chunk, length, C)
        k_id = load_rows(k + head * D, rows, valid, H * D, D, BLOCK_D)
        token_mask, token_offsets = transposed_column_offsets(rows, valid, e, head, H, E)
        v_ei = tl.load(v + token_offsets, mask=token_mask, other=0.0)
        lower_inverse = load_rows(inverses + (sequence * chunks + chunk) * C * C, i, i >= 0, C, C, C)
        beta_i = load_token_scalars(beta, rows, valid, head, H)
        log_decay, end = load_log_decays(log_decays, sample, chunk, length, head, H, C, DECAYS)
        rounded = state.to(k_id.dtype)
        tl.store(states + (sequence * chunks + chunk) * D * E + state_offsets, rounded, mask=state_mask)
        predicted = product(rounded, tl.trans(k_id))
        if DECAYS:
            predicted *= tl.exp2(log_decay)[None, :]
        scaled_error = beta_i[None, :] * (v_ei - predicted)
        u = scaled_error + product(scaled_error.to(k_id.dtype), tl.trans(lower_inverse))
        tl.store(updates + token_offsets, u.to(k_id.dtype), mask=token_mask)
        if DECAYS:
            u *= tl.exp2(end - log_decay)[None, :]
            state *= tl.exp2(end)
        state += product(u.to(k_id.dtype), k_id)
    tl.store(final_state + sequence * D * E + state_offsets, state, mask=state_mask)


@triton.jit
def read_states(
    q, log_decays, pairs, states, updates, out, length, chunks, scale,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr,
):  # fmt: skip
    """Write o. Grid (samples * H * chunks, blocks of E).

    Tensors as in `scan_chunks`, and:
        q: [samples, length, H, D].
        pairs: pair products of q and k without scale, see `multiply_pairs`.
        out: [samples, length, H, E].
    """
    sample, head, chunk = split_program(tl.program_id(0), chunks, H)
    rows, valid = rows_of_chunk(sample, chunk, length, C)
    index = tl.program_id(0).to(tl.int64)
    d, e, i = tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, C)
    q_id = load_rows(q + head * D, rows, valid, H * D, D, BLOCK_D)
    log_decay, _ = load_log_decays(log_decays, sample, chunk, length, head, H, C, DECAYS)
    state_mask, state_offsets = (d < D)[:, None] & (e < E)[None, :], d[:, None] * E + e[None, :]
    o = product(q_id, tl.load(states + index * D * E + state_offsets, mask=state_mask, other=0.0))
    if DECAYS:
        o *= tl.exp2(log_decay)[:, None]
    token_mask, token_offsets = column_offsets(rows, valid, e, head, H, E)
    u = tl.load(updates + token_offsets, mask=token_mask, other=0.0)
    o += product(load_rows(pairs + index * C * C, i, i >= 0, C, C, C), u)
    tl.store(out + token_offsets, (o * scale).to(out.dtype.element_ty), mask=token_mask)
