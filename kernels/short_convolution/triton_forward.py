"""Short convolution in Triton. `triton_tile` describes the division of the work."""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.short_convolution.triton_tile import (
    grid_position,
    inverse_norm,
    load_history,
    load_taps,
    sum_over_taps,
    tile_position,
)


@triton.jit(do_not_specialize=["length", "chunk_length", "batch"])
def convolve(
    x, before, weight, bias, outputs, length, chunk_length, batch, time_stride, batch_stride, unit_stride,
    U: tl.constexpr, W: tl.constexpr, K: tl.constexpr, SEGMENTS: tl.constexpr, PROGRAMS: tl.constexpr,
    STEP: tl.constexpr, EPSILON: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write every part. Grid (chunks * batch * PROGRAMS).

    Tensors:
        x: [length, batch, U, W]. Its strides are the stride arguments times ALIGN, and 1 in the last dimension.
        before: [K - 1, batch, U, W].
        weight: [U, W, K].
        bias: [U, W], or None.
        outputs: a tuple with one [batch, length, U, width] tensor per segment.

    SEGMENTS: see `triton_launch.Segment`; PROGRAMS: number of tiles per row; STEP: rows that are loaded at a time.
    """
    tile, _, sample, begin, end = grid_position(PROGRAMS, batch, length, chunk_length)
    time_stride, batch_stride, unit_stride = time_stride * ALIGN, batch_stride * ALIGN, unit_stride * ALIGN
    x += sample * batch_stride
    before += sample * U * W
    for s in tl.static_range(len(SEGMENTS)):
        if (tile >= SEGMENTS[s].first) & (tile < SEGMENTS[s].end):
            convolve_segment(
                x, before, weight, bias, outputs[s] + sample * length * U * SEGMENTS[s].width,
                tile - SEGMENTS[s].first, begin, end, batch, time_stride, unit_stride,
                U, W, K, STEP, EPSILON, SEGMENTS[s].start, SEGMENTS[s].width, SEGMENTS[s].unit_length,
                SEGMENTS[s].units, SEGMENTS[s].block,
            )  # fmt: skip


@triton.jit
def convolve_segment(
    x, before, weight, bias, output, tile, begin, end, batch, time_stride, unit_stride,
    U: tl.constexpr, W: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, EPSILON: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, UNIT_LENGTH: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one tile of a segment (see `triton_launch.Segment`). The pointers are offset to the sample."""
    unit, column, exists = tile_position(tile, U, WIDTH, UNITS, BLOCK)
    channel = unit * W + START + column
    taps, shift = load_taps(weight, bias, channel, exists, K)
    x += unit * unit_stride + START + column
    output += unit * WIDTH + column
    window = load_history(x, before + channel, begin, time_stride, batch * U * W, exists, K)
    for start in range(begin, end, STEP):
        rows = ()
        for i in tl.static_range(STEP):
            rows += (tl.load(x + (start + i) * time_stride, mask=exists & (start + i < end), other=0.0),)
        for i in tl.static_range(STEP):
            window += (rows[i].to(tl.float32),)
            y = sum_over_taps(window, taps, shift, K)
            y = y * tl.sigmoid(y)
            if UNIT_LENGTH:
                y = y * inverse_norm(y, EPSILON)
            pointers = output + (start + i) * U * WIDTH
            tl.store(pointers, y.to(output.dtype.element_ty), mask=exists & (start + i < end))
            window = window[1:]
