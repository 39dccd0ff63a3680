"""Gradients of the selective scan, in Triton.

The adjoint of the state runs backwards. With dh the adjoint after token t, including the term of its output:

    dh = carry + C dy;  carry <- exp2(dt rate) dh

Chunks are combined as in the forward pass: `find_chunk_starts` computes the adjoint before each chunk from a zero
adjoint after it. `join_chunks` and `scan_backward` follow. States are recomputed from the saved ones, STEP at a time in
registers. With h' the state before the token, w = dt x, and sums over n:

    dB = dh w;  dC = dy h;  dw = sum dh B;  dx = dw dt + D dy;  ddt = dw x + sum carry h' A;  dA = carry h' dt

No two programs write the same output, so there are no atomics and the order of summation is deterministic.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import LN2, LOG2E
from kernels.selective_scan.triton_forward import grid_position
from kernels.selective_scan.triton_tile import (
    has_channel,
    load_float,
    load_token,
    sum_over_channels,
    sum_over_states,
    tile_position,
)


@triton.jit(do_not_specialize=["unit"])
def find_chunk_starts(
    dy, dt, A, C, starts, dt_sums, length, chunk_length, chunks, group_blocks, group_channels, sample_stride,
    time_stride, unit,
    G: tl.constexpr, N: tl.constexpr, NR: tl.constexpr, ER: tl.constexpr, NL: tl.constexpr, EL: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the adjoint of the state before each chunk, for a zero adjoint after the chunk.

    Grid (samples * chunks * G * group_blocks). Tensors and scalars as in `triton_forward.find_chunk_ends`, and:
        dy: [rows, channels], gradient of the output.
        C: [rows, G, N].
        starts: fp32 [samples, chunks, channels, N], written.
    """
    sample, chunk, group, channel, count = grid_position(
        tl.program_id(0), chunks, group_blocks, group_channels, G, ER * EL
    )
    n, e, _, e_writer = tile_position(unit, NR, ER, NL, EL)
    exists, channels = has_channel(e, count, WHOLE), G * group_channels
    begin, end = chunk * chunk_length, tl.minimum((chunk + 1) * chunk_length, length)
    dy, dt, C = dy + channel, dt + channel, C + group * N
    rate = load_float(A + (channel + e) * N + n, exists) * LOG2E
    carry = tl.zeros([NR, ER, NL, EL], tl.float32)
    total = tl.zeros([1, ER, NL, EL], tl.float32)
    row = sample.to(tl.int64) * sample_stride + (end - 1).to(tl.int64) * time_stride
    next_dy, next_dt, next_C = load_token(dy, dt, C, row, begin < end, exists, n, e, channels, G * N)
    for t in range(begin, end):
        dy_t, dt_t, C_t = next_dy, next_dt, next_C
        row -= time_stride
        next_dy, next_dt, next_C = load_token(dy, dt, C, row, t + 1 < end, exists, n, e, channels, G * N)
        carry = tl.exp2(dt_t * rate) * (carry + dy_t * C_t)
        total += dt_t
    index = (sample.to(tl.int64) * chunks + chunk) * channels + channel + e
    tl.store(starts + index * N + n, carry, mask=exists)
    tl.store(dt_sums + index, total, mask=exists & e_writer)


@triton.jit
def _states_of_step(
    state, rate, x, dt, B, row, time_stride, count, before, exists, n, e, channels, B_stride,
    STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return STEP + 1 tiles of states: the state before the step, and the state after each of the step's tokens.

    Args:
        state: tile at `row`, the first token of the span.
        count: number of existing tokens of the span.
        before: number of the span's tokens before the step.
    """
    for _ in range(before):
        x_t, dt_t, B_t = load_token(x, dt, B, row, True, exists, n, e, channels, B_stride)
        state = tl.exp2(dt_t * rate) * state + (dt_t * x_t) * B_t
        row += time_stride
    states = (state,)
    for i in tl.static_range(STEP):
        x_t, dt_t, B_t = load_token(x, dt, B, row, WHOLE or before + i < count, exists, n, e, channels, B_stride)
        state = tl.exp2(dt_t * rate) * state + (dt_t * x_t) * B_t
        states += (state,)
        row += time_stride
    return states


@triton.jit(do_not_specialize=["unit"])
def scan_backward(
    dy, x, dt, A, B, C, D, saved_states, after, dx, ddt, dA, dB, dC, dD, dfirst, length, rows, chunk_length, chunks,
    parts, part_blocks, group_blocks, group_channels, sample_stride, time_stride, unit,
    G: tl.constexpr, N: tl.constexpr, NR: tl.constexpr, ER: tl.constexpr, NL: tl.constexpr, EL: tl.constexpr,
    SPAN: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write all gradients. Grid (samples * chunks * G * parts).

    A program processes `part_blocks` blocks of channels one after the other, and sums dB and dC over these blocks.

    Tensors and scalars as in `triton_forward.scan_forward`, and:
        dy: [rows, channels], gradient of the output.
        saved_states: fp32 [samples, spans, channels, N], the state before every SPAN tokens.
        after: fp32 [samples, chunks, channels, N], the adjoint of the state after each chunk, from all later tokens.
        dx, ddt: [rows, channels], written; ddt is fp32.
        dA: fp32 [samples * chunks, channels, N], written.
        dB, dC: fp32 [parts, rows, G, N], written.
        dD: fp32 [samples * chunks, channels], written.
        dfirst: fp32 [samples, channels, N], written: gradient of the first state.
        rows: samples * length.
        parts: number of parts into which a group's blocks are divided. A part has `part_blocks` blocks, the last one
            may have fewer.
        WHOLE: True if all blocks of channels and all steps are complete, so that no masks are needed.
    """
    sample, chunk, group, first_channel, _ = grid_position(tl.program_id(0), chunks, parts, group_channels, G, 0)
    part = tl.program_id(0) % parts
    n, e, n_writer, e_writer = tile_position(unit, NR, ER, NL, EL)
    channels = G * group_channels
    begin, end = chunk * chunk_length, tl.minimum((chunk + 1) * chunk_length, length)
    sample = sample.to(tl.int64)
    index = sample * chunks + chunk
    B, C = B + group * N, C + group * N
    dB, dC = dB + (part.to(tl.int64) * rows * G + group) * N, dC + (part.to(tl.int64) * rows * G + group) * N
    for block in range(part * part_blocks, tl.minimum((part + 1) * part_blocks, group_blocks)):
        exists = has_channel(e, group_channels - block * ER * EL, WHOLE)
        channel = first_channel + block * ER * EL
        x_c, dt_c, dy_c, dx_c, ddt_c = x + channel, dt + channel, dy + channel, dx + channel, ddt + channel
        rate = load_float(A + (channel + e) * N + n, exists) * LOG2E
        skip = load_float(D + channel + e, exists)
        carry = load_float(after + (index * channels + channel + e) * N + n, exists)
        dA_e, dD_e = tl.zeros([NR, ER, NL, EL], tl.float32), tl.zeros([1, ER, NL, EL], tl.float32)
        added = block > part * part_blocks
        for j in range(tl.cdiv(end - begin, STEP)):
            step = begin + (tl.cdiv(end - begin, STEP) - 1 - j) * STEP
            span = sample * tl.cdiv(length, SPAN) + step // SPAN
            step_row = sample * sample_stride + step.to(tl.int64) * time_stride
            # Loaded before the states are recomputed, to hide the memory latency.
            dys = ()
            for i in tl.static_range(STEP):
                valid = WHOLE or step + i < end
                dys += (load_float(dy_c + (step_row + i * time_stride) * channels + e, exists & valid),)
            span_row = sample * sample_stride + (step // SPAN * SPAN).to(tl.int64) * time_stride
            state = load_float(saved_states + (span * channels + channel + e) * N + n, exists)
            states = _states_of_step(
                state, rate, x_c, dt_c, B, span_row, time_stride, end - step // SPAN * SPAN, step % SPAN,
                exists, n, e, channels, G * N, STEP, WHOLE,
            )  # fmt: skip
            for i in tl.static_range(STEP - 1, -1, -1):
                row = step_row + i * time_stride
                valid = WHOLE or step + i < end
                x_t, dt_t, B_t = load_token(x_c, dt_c, B, row, valid, exists, n, e, channels, G * N)
                C_t = load_float(C + row * G * N + n, valid)
                dB_t = load_float(dB + row * G * N + n, valid & added)
                dC_t = load_float(dC + row * G * N + n, valid & added)
                dy_t = dys[i]
                dh = carry + dy_t * C_t
                carry = tl.exp2(dt_t * rate) * dh
                through = carry * states[i]
                dw_t = sum_over_states(dh * B_t)
                ddt_t = dw_t * x_t + sum_over_states(through * rate) * LN2
                dx_t = dw_t * dt_t + skip * dy_t
                dB_t += sum_over_channels(dh * (dt_t * x_t))
                dC_t += sum_over_channels(dy_t * states[i + 1])
                dA_e += through * dt_t
                dD_e += dy_t * x_t
                tl.store(dx_c + row * channels + e, dx_t.to(dx.dtype.element_ty), mask=exists & e_writer & valid)
                tl.store(ddt_c + row * channels + e, ddt_t, mask=exists & e_writer & valid)
                tl.store(dB + row * G * N + n, dB_t, mask=n_writer & valid)
                tl.store(dC + row * G * N + n, dC_t, mask=n_writer & valid)
        tl.store(dA + (index * channels + channel + e) * N + n, dA_e, mask=exists)
        tl.store(dD + index * channels + channel + e, dD_e, mask=exists & e_writer)
        # All threads must have written dB and dC before the next block adds to them.
        tl.debug_barrier()
        if chunk == 0:
            tl.store(dfirst + (sample * channels + channel + e) * N + n, carry, mask=exists)
