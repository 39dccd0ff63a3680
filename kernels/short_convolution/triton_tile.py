"""Program positions, the rows before a chunk, and the sum over taps, shared by the short convolution's kernels.

A program is one warp that iterates over the rows (positions) of a chunk. It processes one tile [UNITS, BLOCK] of each
row: BLOCK features of one part, for several units if the part is narrow. The last K - 1 rows stay in registers, so each
element is read once.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl


@triton.jit
def grid_position(PROGRAMS: tl.constexpr, batch, length, chunk_length):
    """Return a program's position in the grid chunks * batch * PROGRAMS; consecutive programs share a row.

    Returns:
        tile: index of the program's tile within a row, from 0 to PROGRAMS - 1.
        partial: chunk * batch + sample.
        sample: int64.
        begin, end: first position and end of the chunk, int64.
    """
    program = tl.program_id(0)
    tile, partial = program % PROGRAMS, program // PROGRAMS
    sample, begin = (partial % batch).to(tl.int64), (partial // batch).to(tl.int64) * chunk_length
    return tile, partial, sample, begin, tl.minimum(begin + chunk_length, length)


@triton.jit
def tile_position(tile, U: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the units and columns of a segment's tile.

    Returns:
        unit: int [UNITS, 1].
        column: int [1, BLOCK], relative to the segment's first column.
        exists: bool [UNITS, BLOCK].
    """
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    unit = (tile // blocks) * UNITS + tl.arange(0, UNITS)[:, None]
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    # For masks that are constant at compile time, the compiler generates no masked access.
    exists = tl.full([UNITS, BLOCK], True, tl.int1)
    if U % UNITS:
        exists &= unit < U
    if WIDTH % BLOCK:
        exists &= column < WIDTH
    return unit, column, exists


@triton.jit
def load_taps(weight, bias, channel, exists, K: tl.constexpr):
    """Load the K taps of a tile's features, and their bias, zero if it is None: fp32.

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
    """Load the K - 1 rows before position `begin`, fp32, the oldest first.

    Args:
        x: pointers to the tile in row 0; `stride`: elements between rows.
        before: pointers to the tile in the first of the K - 1 rows before row 0; `before_stride`: as for x.
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
    """Return the convolution at the last of K rows, fp32 [UNITS, BLOCK]."""
    total = bias
    for j in tl.static_range(K):
        total += window[j] * taps[j]
    return total


@triton.jit
def inverse_norm(x, EPSILON: tl.constexpr):
    """Return the inverse L2 norm of each unit's vector, [UNITS, 1]."""
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + EPSILON)
