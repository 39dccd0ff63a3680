"""What the kernels of the short convolution share: where a program is, the rows before its own, the sum over taps.

A program is one warp and walks over the positions of a chunk, one row after the other. It has a tile [UNITS, BLOCK] of
each row: BLOCK features of one part, for several units where they are narrow. The last rows stay in registers, so each
number is read once.
"""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import triton
import triton.language as tl


@triton.jit
def place_in_grid(PROGRAMS: tl.constexpr, batch, length, chunk_length):
    """What a program has, of all chunks * batch * PROGRAMS; neighbours have neighbours of a row.

    Returns:
        place: which of a row's tiles, from 0 to PROGRAMS - 1.
        share: chunk * batch + sample.
        sample: int64.
        begin, end: positions, int64.
    """
    program = tl.program_id(0)
    place, share = program % PROGRAMS, program // PROGRAMS
    sample, begin = (share % batch).to(tl.int64), (share // batch).to(tl.int64) * chunk_length
    return place, share, sample, begin, tl.minimum(begin + chunk_length, length)


@triton.jit
def place_in_row(place, U: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Where a tile of a segment is; `place` counts from the segment's first.

    Returns:
        unit: int [UNITS, 1].
        column: int [1, BLOCK], from the segment's first.
        exists: bool [UNITS, BLOCK].
    """
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    unit = (place // blocks) * UNITS + tl.arange(0, UNITS)[:, None]
    column = (place % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    # Of what is known when it is compiled, the compiler makes no masks.
    exists = tl.full([UNITS, BLOCK], True, tl.int1)
    if U % UNITS:
        exists &= unit < U
    if WIDTH % BLOCK:
        exists &= column < WIDTH
    return unit, column, exists


@triton.jit
def load_taps(weight, bias, channel, exists, K: tl.constexpr):
    """The K taps of a tile's features, and their bias, zero where there is none: fp32.

    Args:
        weight, bias: pointers to [channels, K] and [channels]; bias may be None.
        channel: int [UNITS, BLOCK].
    """
    taps = ()
    for j in tl.static_range(K):
        taps += (tl.load(weight + channel * K + j, mask=exists, other=0.0).to(tl.float32),)
    shift = tl.zeros(channel.shape, tl.float32)
    if bias is not None:
        shift += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    return taps, shift


@triton.jit
def load_history(x, before, begin, stride, before_stride, exists, K: tl.constexpr):
    """The K - 1 rows ahead of position `begin`, fp32, the oldest first.

    Args:
        x: pointers to the tile in row 0; `stride`: numbers from a row to the next.
        before: pointers to the tile in the first of the K - 1 rows before row 0; `before_stride` as above.
    """
    rows = ()
    for i in tl.static_range(K - 1):
        row = begin - (K - 1) + i
        inside = tl.load(x + row * stride, mask=exists & (row >= 0), other=0.0).to(tl.float32)
        outside = tl.load(before + (row + K - 1) * before_stride, mask=exists & (row < 0), other=0.0).to(tl.float32)
        rows += (inside + outside,)
    return rows


@triton.jit
def sum_over_taps(window, taps, bias, K: tl.constexpr):
    """The convolution at the last of K rows, fp32 [UNITS, BLOCK]."""
    total = bias
    for j in tl.static_range(K):
        total += window[j] * taps[j]
    return total


@triton.jit
def inverse_length(x, EPSILON: tl.constexpr):
    """Of each unit's vector, [UNITS, 1]."""
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + EPSILON)
