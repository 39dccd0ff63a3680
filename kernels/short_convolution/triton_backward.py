"""Gradients of the short convolution, in Triton. `triton_tile` describes the division of the work.

With z the convolution, a = z sigmoid(z), y = r a, and r the inverse norm of a (1 for a part without normalisation):

    da = r dy - r^3 a (a . dy);  dz = da sigmoid(z) (1 + z (1 - sigmoid(z)))
    dx_t = sum over j of weight_j dz_{t + K - 1 - j};  dweight_j = sum over t of dz_t x_{t - (K - 1 - j)}

z is recomputed from x. A program also reads the K - 1 rows after its chunk, for their contribution to its gradients.
No two programs write the same output. `sum_partials` adds the programs' sums over a chunk. There are no atomics, and
the order of summation is deterministic.
"""

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
def differentiate(
    x, before, weight, bias, gradients, dx, dbefore, partials, length, chunk_length, batch, time_stride, batch_stride,
    unit_stride,
    U: tl.constexpr, W: tl.constexpr, K: tl.constexpr, SEGMENTS: tl.constexpr, PROGRAMS: tl.constexpr,
    STEP: tl.constexpr, EPSILON: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write dx and dbefore, and each chunk's contribution to dweight and dbias. Grid (chunks * batch * PROGRAMS).

    Tensors and scalars as in `triton_forward.convolve`, and:
        gradients: a tuple with one [batch, length, U, width] tensor per segment.
        dx: [length, batch, U, W], written.
        dbefore: [K - 1, batch, U, W], written.
        partials: fp32 [chunks * batch, K + 1, U, W], written: each chunk's dweight for the K taps, then dbias;
            [chunks * batch, K, U, W] without a bias.
    """
    tile, partial, sample, begin, end = grid_position(PROGRAMS, batch, length, chunk_length)
    time_stride, batch_stride, unit_stride = time_stride * ALIGN, batch_stride * ALIGN, unit_stride * ALIGN
    x += sample * batch_stride
    before, dx, dbefore = before + sample * U * W, dx + sample * U * W, dbefore + sample * U * W
    partials += partial.to(tl.int64) * (K if bias is None else K + 1) * U * W
    for s in tl.static_range(len(SEGMENTS)):
        if (tile >= SEGMENTS[s].first) & (tile < SEGMENTS[s].end):
            differentiate_segment(
                x, before, weight, bias, gradients[s] + sample * length * U * SEGMENTS[s].width, dx, dbefore, partials,
                tile - SEGMENTS[s].first, begin, end, length, batch, time_stride, unit_stride,
                U, W, K, STEP, EPSILON, SEGMENTS[s].start, SEGMENTS[s].width, SEGMENTS[s].unit_length,
                SEGMENTS[s].units, SEGMENTS[s].block,
            )  # fmt: skip


@triton.jit
def differentiate_segment(
    x, before, weight, bias, gradient, dx, dbefore, partials, tile, begin, end, length, batch, time_stride, unit_stride,
    U: tl.constexpr, W: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, EPSILON: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, UNIT_LENGTH: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one tile of a segment (see `triton_launch.Segment`).

    The pointers are offset to the sample, and `partials` to the chunk's part.
    """
    unit, column, exists = tile_position(tile, U, WIDTH, UNITS, BLOCK)
    channel = unit * W + START + column
    taps, shift = load_taps(weight, bias, channel, exists, K)
    x += unit * unit_stride + START + column
    gradient += unit * WIDTH + column
    before, dx, dbefore, partials = before + channel, dx + channel, dbefore + channel, partials + channel
    window = load_history(x, before, begin, time_stride, batch * U * W, exists, K)
    pending, sums, zero = (), (), tl.zeros(channel.shape, tl.float32)
    for _ in tl.static_range(K - 1):
        pending += (zero,)  # gradients of the last K - 1 rows, to which later rows still contribute
    for _ in tl.static_range(K):
        sums += (zero,)
    bias_sum = zero
    for start in range(begin, end + K - 1, STEP):
        rows = ()
        for i in tl.static_range(STEP):
            valid = exists & (start + i < length)
            x_t = tl.load(x + (start + i) * time_stride, mask=valid, other=0.0)
            rows += ((x_t, tl.load(gradient + (start + i) * U * WIDTH, mask=valid, other=0.0)),)
        for i in tl.static_range(STEP):
            window += (rows[i][0].to(tl.float32),)
            z = sum_over_taps(window, taps, shift, K)
            dz = differentiate_activation(z, rows[i][1].to(tl.float32), UNIT_LENGTH, EPSILON)
            own_dz = tl.where(start + i < end, dz, 0.0)
            bias_sum += own_dz
            sums = add_products(sums, window, own_dz, K)
            pending += (zero,)
            pending = add_products(pending, taps, dz, K)
            row = start + i - (K - 1)
            dx_row = pending[0].to(dx.dtype.element_ty)
            tl.store(dx + row * batch * U * W, dx_row, mask=exists & (row >= begin) & (row < end))
            tl.store(dbefore + (row + K - 1) * batch * U * W, dx_row, mask=exists & (row < 0))
            window, pending = window[1:], pending[1:]
    for j in tl.static_range(K):
        tl.store(partials + j * U * W, sums[j], mask=exists)
    if bias is not None:
        tl.store(partials + K * U * W, bias_sum, mask=exists)


@triton.jit
def differentiate_activation(z, dy, UNIT_LENGTH: tl.constexpr, EPSILON: tl.constexpr):
    """Return dz, fp32 [UNITS, BLOCK], from z and dy."""
    gate = tl.sigmoid(z)
    if UNIT_LENGTH:
        a = z * gate
        r = inverse_norm(a, EPSILON)
        dy = r * (dy - a * (r * r * tl.sum(a * dy, 1, keep_dims=True)))
    return dy * gate * (1 + z * (1 - gate))


@triton.jit
def add_products(totals, factors, x, K: tl.constexpr):
    """Return totals_j + factors_j x for each j < K."""
    result = ()
    for j in tl.static_range(K):
        result += (totals[j] + factors[j] * x,)
    return result


@triton.jit(do_not_specialize=["count"])
def sum_partials(
    partials, dweight, dbias, count, channels: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum dweight and dbias over the chunks. Grid (channel blocks, K + 1), or (channel blocks, K) without a bias.

    Tensors:
        partials: fp32 [count, K + 1, channels], or [count, K, channels] without a bias.
        dweight: [channels, K], written.
        dbias: [channels], written, or None.
    """
    tap, taps = tl.program_id(1), tl.num_programs(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, count, ROWS):
        partial = start + tl.arange(0, ROWS)[:, None]
        pointers = partials + (partial.to(tl.int64) * taps + tap) * channels + channel[None, :]
        total += tl.load(pointers, mask=(partial < count) & exists[None, :], other=0.0)
    total = tl.sum(total, 0)
    tl.store(dweight + channel * K + tap, total.to(dweight.dtype.element_ty), mask=exists & (tap < K))
    if dbias is not None:
        tl.store(dbias + channel, total.to(dbias.dtype.element_ty), mask=exists & (tap == K))
