"""Selective scan in Triton, parallel over chunks of tokens.

`find_chunk_ends` computes each chunk's final state, starting from a zero state. `join_chunks` combines these final
states into the actual state before each chunk. `scan_forward` computes the chunk's outputs from that state. With rates
in units of log2:

    h <- exp2(dt rate) h + (dt x) B;  y = C . h + D x

A program processes one chunk of a sample and a block of ER * EL channels of one group. Its tile of states is described
in `triton_tile`. Token t of sample s is row s * sample_stride + t * time_stride.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import LOG2E
from kernels.selective_scan.triton_tile import has_channel, load_float, load_token, sum_over_states, tile_position


@triton.jit
def grid_position(program, chunks, group_blocks, group_channels, G: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's position in the grid samples * chunks * G * group_blocks.

    Returns:
        sample, chunk, group: indices; the group selects B and C.
        channel: first channel of the block.
        count: number of channels from there to the end of the group.
    """
    block, part = program % group_blocks, program // group_blocks
    group, part = part % G, part // G
    sample, chunk = part // chunks, part % chunks
    return sample, chunk, group, group * group_channels + block * BLOCK, group_channels - block * BLOCK


@triton.jit(do_not_specialize=["unit"])
def find_chunk_ends(
    x, dt, A, B, ends, dt_sums, length, chunk_length, chunks, group_blocks, group_channels, sample_stride, time_stride,
    unit,
    G: tl.constexpr, N: tl.constexpr, NR: tl.constexpr, ER: tl.constexpr, NL: tl.constexpr, EL: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write each chunk's final state for a zero initial state. Grid (samples * chunks * G * group_blocks).

    Tensors:
        x, dt: [rows, channels], dt fp32.
        A: fp32 [channels, N].
        B: [rows, G, N].
        ends: fp32 [samples, chunks, channels, N], written.
        dt_sums: fp32 [samples, chunks, channels], written: the chunk's sum of dt.

    Scalars:
        length: tokens per sample.
        chunk_length, chunks: tokens per chunk, and chunks per sample; the last chunk may be shorter.
        group_blocks, group_channels: blocks of channels per group, and channels per group.
        unit: see `triton_tile`.

    With WHOLE, every block must have ER * EL channels.
    """
    sample, chunk, group, channel, count = grid_position(
        tl.program_id(0), chunks, group_blocks, group_channels, G, ER * EL
    )
    n, e, _, e_writer = tile_position(unit, NR, ER, NL, EL)
    exists, channels = has_channel(e, count, WHOLE), G * group_channels
    begin, end = chunk * chunk_length, tl.minimum((chunk + 1) * chunk_length, length)
    x, dt, B = x + channel, dt + channel, B + group * N
    rate = load_float(A + (channel + e) * N + n, exists) * LOG2E
    state = tl.zeros([NR, ER, NL, EL], tl.float32)
    total = tl.zeros([1, ER, NL, EL], tl.float32)
    # Prefetch: the next token's inputs are loaded while the current token is computed.
    row = sample.to(tl.int64) * sample_stride + begin.to(tl.int64) * time_stride
    next_x, next_dt, next_B = load_token(x, dt, B, row, begin < end, exists, n, e, channels, G * N)
    for t in range(begin, end):
        x_t, dt_t, B_t = next_x, next_dt, next_B
        row += time_stride
        next_x, next_dt, next_B = load_token(x, dt, B, row, t + 1 < end, exists, n, e, channels, G * N)
        state = tl.exp2(dt_t * rate) * state + (dt_t * x_t) * B_t
        total += dt_t
    index = (sample.to(tl.int64) * chunks + chunk) * channels + channel + e
    tl.store(ends + index * N + n, state, mask=exists)
    tl.store(dt_sums + index, total, mask=exists & e_writer)


@triton.jit
def join_chunks(
    ends, dt_sums, A, first, chunks, channels,
    N: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Replace each chunk's final state by the state at its start. Grid (samples, blocks of elements).

    With REVERSED, chunks are processed from the last to the first, for adjoints. A program processes BLOCK of a
    sample's channels * N elements. It loads AHEAD chunks at a time, because it is bound by memory latency.

    Tensors:
        ends: fp32 [samples, chunks, channels, N], final state of each chunk for a zero initial state; replaced.
        dt_sums: fp32 [samples, chunks, channels].
        A: fp32 [channels, N].
        first: fp32 [samples, channels, N], initial state of the chunk that is processed first.
    """
    sample = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = i < channels * N
    rate = load_float(A + i, exists) * LOG2E
    state = load_float(first + sample * channels * N + i, exists)
    for start in range(0, chunks, AHEAD):
        parts = ()
        for j in tl.static_range(AHEAD):
            chunk = sample * chunks + (chunks - 1 - start - j if REVERSED else start + j)
            valid = exists & (start + j < chunks)
            end = load_float(ends + chunk * channels * N + i, valid)
            dt = load_float(dt_sums + chunk * channels + i // N, valid)
            parts += ((chunk, valid, dt, end),)
        for j in tl.static_range(AHEAD):
            chunk, valid, dt, end = parts[j]
            tl.store(ends + chunk * channels * N + i, state, mask=valid)
            state = tl.exp2(dt * rate) * state + end


@triton.jit(do_not_specialize=["unit"])
def scan_forward(
    x, dt, A, B, C, D, before, y, saved_states, last, length, chunk_length, chunks, group_blocks, group_channels,
    sample_stride, time_stride, unit,
    G: tl.constexpr, N: tl.constexpr, NR: tl.constexpr, ER: tl.constexpr, NL: tl.constexpr, EL: tl.constexpr,
    WHOLE: tl.constexpr, SPAN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Write the outputs and the last state. Grid (samples * chunks * G * group_blocks).

    Tensors and scalars as in `find_chunk_ends`, and:
        C: [rows, G, N].
        D: fp32 [channels].
        before: fp32 [samples, chunks, channels, N], the state before each chunk.
        y: [rows, channels], written.
        saved_states: fp32 [samples, spans, channels, N], written if KEEP: the state before every SPAN tokens. SPAN
            divides chunk_length if there are several chunks.
        last: fp32 [samples, channels, N], written: the state after the last token.
    """
    sample, chunk, group, channel, count = grid_position(
        tl.program_id(0), chunks, group_blocks, group_channels, G, ER * EL
    )
    n, e, _, e_writer = tile_position(unit, NR, ER, NL, EL)
    exists, channels = has_channel(e, count, WHOLE), G * group_channels
    begin, end = chunk * chunk_length, tl.minimum((chunk + 1) * chunk_length, length)
    sample = sample.to(tl.int64)
    rate = load_float(A + (channel + e) * N + n, exists) * LOG2E
    skip = load_float(D + channel + e, exists)
    state = load_float(before + ((sample * chunks + chunk) * channels + channel + e) * N + n, exists)
    row = sample * sample_stride + begin.to(tl.int64) * time_stride
    x, dt, B, C, y = x + channel, dt + channel, B + group * N, C + group * N, y + channel
    next_x, next_dt, next_B = load_token(x, dt, B, row, begin < end, exists, n, e, channels, G * N)
    next_C = load_float(C + row * G * N + n, begin < end)
    for t in range(begin, end):
        if KEEP and t % SPAN == 0:
            span = sample * tl.cdiv(length, SPAN) + t // SPAN
            tl.store(saved_states + (span * channels + channel + e) * N + n, state, mask=exists)
        x_t, dt_t, B_t, C_t = next_x, next_dt, next_B, next_C
        outputs = y + row * channels + e
        row += time_stride
        next_x, next_dt, next_B = load_token(x, dt, B, row, t + 1 < end, exists, n, e, channels, G * N)
        next_C = load_float(C + row * G * N + n, t + 1 < end)
        state = tl.exp2(dt_t * rate) * state + (dt_t * x_t) * B_t
        y_t = sum_over_states(state * C_t) + skip * x_t
        tl.store(outputs, y_t.to(y.dtype.element_ty), mask=exists & e_writer)
    if chunk == chunks - 1:
        tl.store(last + (sample * channels + channel + e) * N + n, state, mask=exists)
