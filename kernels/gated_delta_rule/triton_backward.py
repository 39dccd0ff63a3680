"""Gradients of the gated delta rule, in Triton.

Symbols are those of `triton_forward`. dS is the gradient of the state after the chunk. Without decays:

    du_j = scale sum_{i>=j} (q_i.k_j) do_i + dS^T k_j;  y = (1 + M)^-T du;  dv = beta y;  dbeta = y.u / beta
    dS <- dS + scale sum_i q_i do_i^T - sum_i k_i dv_i^T
    dq_i = scale (S do_i + sum_{j<=i} (do_i.u_j) k_j)
    dk_i = dS u_i - S dv_i + scale sum_{j>=i} (do_j.u_i) q_j - sum_{j<i} (dv_i.u_j) k_j - sum_{j>i} (dv_j.u_i) k_j

The last line needs no gradient of the inverse: dM = -y u^T, because (1 + M) u = beta x. With decays, each pair and each
term with S or dS has a decay factor. The gradient of g is the sum over this and later tokens of the gradients of the
factors' exponents. No two programs write the same output, so the order of summation is deterministic.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import load_rows, load_token_scalars, product
from kernels.gated_delta_rule.triton_tile import (
    column_offsets,
    load_log_decays,
    rows_of_chunk,
    scan_position,
    split_program,
    transposed_column_offsets,
)


@triton.jit
def scan_chunks_back(
    dout, dfinal_state, q, k, beta, log_decays, inverses, pairs, updates, dstates, dv, dbeta,
    dinitial_state, length, chunks, scale,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr,
):  # fmt: skip
    """Scan from the last chunk to the first. Grid (blocks of E, samples * H).

    Tensors as in `triton_forward`, and:
        dout: [samples, length, H, E], gradient of o.
        dfinal_state: fp32 [samples, H, D, E], gradient of the final state.
        dstates: [samples, H, chunks, D, E] in k's dtype, written: gradient of the state after each chunk.
        dv: [samples, length, H, E], written.
        dbeta: fp32 [blocks of E, samples, length, H], written; the caller sums over the blocks.
        dinitial_state: fp32 [samples, H, D, E], written.
    """
    sequence, sample, head, e, state_mask, state_offsets = scan_position(H, D, E, BLOCK_D, BLOCK_E)
    i, samples = tl.arange(0, C), tl.num_programs(1) // H
    dbeta += tl.program_id(0).to(tl.int64) * samples * length * H
    dstate = tl.load(dfinal_state + sequence * D * E + state_offsets, mask=state_mask, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step
        rows, valid = rows_of_chunk(sample, chunk, length, C)
        q_id = load_rows(q + head * D, rows, valid, H * D, D, BLOCK_D)
        k_id = load_rows(k + head * D, rows, valid, H * D, D, BLOCK_D)
        token_mask, token_offsets = transposed_column_offsets(rows, valid, e, head, H, E)
        do = tl.load(dout + token_offsets, mask=token_mask, other=0.0)
        u = tl.load(updates + token_offsets, mask=token_mask, other=0.0)
        lower_inverse = load_rows(inverses + (sequence * chunks + chunk) * C * C, i, i >= 0, C, C, C)
        pairs_ij = load_rows(pairs + (sequence * chunks + chunk) * C * C, i, i >= 0, C, C, C)
        beta_i = load_token_scalars(beta, rows, valid, head, H)
        log_decay, end = load_log_decays(log_decays, sample, chunk, length, head, H, C, DECAYS)
        dstate_rounded = dstate.to(k_id.dtype)
        tl.store(dstates + (sequence * chunks + chunk) * D * E + state_offsets, dstate_rounded, mask=state_mask)
        du = product(dstate_rounded, tl.trans(k_id))
        if DECAYS:
            du *= tl.exp2(end - log_decay)[None, :]
        du += scale * product(do, pairs_ij)
        y = du + product(du.to(k_id.dtype), lower_inverse)
        dbeta_i = tl.sum(y * u, 0) / tl.where(beta_i == 0, 1.0, beta_i)
        tl.store(dbeta + rows * H + head, dbeta_i, mask=valid)
        dv_ei = beta_i[None, :] * y
        tl.store(dv + token_offsets, dv_ei.to(dv.dtype.element_ty), mask=token_mask)
        if DECAYS:
            decay_from_start = tl.exp2(log_decay)[None, :]
            do, dv_ei = (do * decay_from_start).to(do.dtype), dv_ei * decay_from_start
            dstate *= tl.exp2(end)
        dstate += scale * product(do, q_id)
        dstate -= product(dv_ei.to(k_id.dtype), k_id)
    tl.store(dinitial_state + sequence * D * E + state_offsets, dstate, mask=state_mask)


@triton.jit
def write_gradients(
    dout, q, k, log_decays, ds, dm, states, dstates, updates, dv, dq, dk, dg, length, chunks, scale,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    DECAYS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k and g. Grid (samples * H * chunks, blocks of D).

    Tensors as in `scan_chunks_back`, and (see `triton_forward.multiply_pairs`):
        ds: pair products of dout and u, with scale.
        dm: strict pair products of dv and u: minus the gradient with respect to M_ij / beta_i.
        dq, dk: [samples, length, H, D], written.
        dg: fp32 [blocks of D, samples, length, H], written; the caller sums over the blocks.
    """
    sample, head, chunk = split_program(tl.program_id(0), chunks, H)
    rows, valid = rows_of_chunk(sample, chunk, length, C)
    first_d = tl.program_id(1) * BLOCK_D
    d, i = first_d + tl.arange(0, BLOCK_D), tl.arange(0, C)
    state_offset = tl.program_id(0).to(tl.int64) * D * E
    dq_id, dk_later_id = tl.zeros([C, BLOCK_D], tl.float32), tl.zeros([C, BLOCK_D], tl.float32)
    dk_earlier_id = tl.zeros([C, BLOCK_D], tl.float32)
    dlog_decay = 0.0
    for first_e in range(0, E, BLOCK_E):
        e = first_e + tl.arange(0, BLOCK_E)
        token_mask, token_offsets = column_offsets(rows, valid, e, head, H, E)
        do = tl.load(dout + token_offsets, mask=token_mask, other=0.0)
        u = tl.load(updates + token_offsets, mask=token_mask, other=0.0)
        dv_ie = tl.load(dv + token_offsets, mask=token_mask, other=0.0)
        state_mask, state_offsets = (d < D)[:, None] & (e < E)[None, :], state_offset + d[:, None] * E + e[None, :]
        state = tl.load(states + state_offsets, mask=state_mask, other=0.0)
        dstate = tl.load(dstates + state_offsets, mask=state_mask, other=0.0)
        dq_id += product(do, tl.trans(state))
        dk_later_id += product(dv_ie, tl.trans(state))
        dk_earlier_id += product(u, tl.trans(dstate))
        if DECAYS:
            dlog_decay += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
    token_mask, token_offsets = column_offsets(rows, valid, d, head, H, D)
    q_id = tl.load(q + token_offsets, mask=token_mask, other=0.0)
    k_id = tl.load(k + token_offsets, mask=token_mask, other=0.0)
    log_decay, end = load_log_decays(log_decays, sample, chunk, length, head, H, C, DECAYS)
    if DECAYS:
        decay_from_start = tl.exp2(log_decay)[:, None]
        dq_id *= decay_from_start
        dk_later_id *= decay_from_start
        dk_earlier_id *= tl.exp2(end - log_decay)[:, None]
        dlog_decay = dlog_decay * tl.exp2(end) + tl.sum(k_id * dk_earlier_id)
    pair_offset = tl.program_id(0).to(tl.int64) * C * C
    ds_ij = load_rows(ds + pair_offset, i, i >= 0, C, C, C)
    dm_ij = load_rows(dm + pair_offset, i, i >= 0, C, C, C)
    dq_id = scale * dq_id + product(ds_ij, k_id)
    dk_later_id = -dk_later_id - product(dm_ij, k_id)
    dk_earlier_id += product(tl.trans(ds_ij), q_id) - product(tl.trans(dm_ij), k_id)
    tl.store(dq + token_offsets, dq_id.to(dq.dtype.element_ty), mask=token_mask)
    tl.store(dk + token_offsets, (dk_later_id + dk_earlier_id).to(dk.dtype.element_ty), mask=token_mask)
    if DECAYS:
        dexponent_i = tl.sum(q_id * dq_id + k_id * (dk_later_id - dk_earlier_id), 1)
        dexponent_i += tl.where(i == C - 1, dlog_decay, 0.0)
        samples = tl.num_programs(0) // (H * chunks)
        dg += tl.program_id(1).to(tl.int64) * samples * length * H
        tl.store(dg + rows * H + head, tl.cumsum(dexponent_i, 0, reverse=True), mask=valid)
