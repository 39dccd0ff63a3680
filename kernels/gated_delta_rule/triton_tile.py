"""What the gated delta rule's Triton kernels share: where a chunk lies, its decays, and the inverse of its system."""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import triton
import triton.language as tl

from kernels.triton_math import product_tf32

CHUNK = 64
"""Tokens of a chunk."""

SOLVED = tl.constexpr(16)
"""Rows of the blocks on the diagonal that are solved row by row."""


@triton.jit
def place_of(program, chunks, heads):
    """What a program has of all samples * heads * chunks: the sample, as int64, its head and its chunk."""
    place, chunk = program // chunks, program % chunks
    return (place // heads).to(tl.int64), place % heads, chunk


@triton.jit
def rows_of_chunk(sample, chunk, length, C: tl.constexpr):
    """Rows of [samples * length, ...] that are a chunk's, and which of them exist."""
    t = chunk * C + tl.arange(0, C)
    return sample * length + t, t < length


@triton.jit
def place_columns(rows, valid, columns, head, heads, WIDTH: tl.constexpr):
    """Which columns of tokens in [rows, heads, WIDTH] exist, and where they lie: two tiles [C, columns]."""
    return valid[:, None] & (columns < WIDTH)[None, :], (rows * heads + head)[:, None] * WIDTH + columns[None, :]


@triton.jit
def place_columns_as_rows(rows, valid, columns, head, heads, WIDTH: tl.constexpr):
    """As `place_columns`, [columns, C]."""
    return (columns < WIDTH)[:, None] & valid[None, :], (rows * heads + head)[None, :] * WIDTH + columns[:, None]


@triton.jit
def place_of_walk(H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """What a program of a walk has, of all blocks of E and heads of samples.

    Returns:
        place: of its sample's head among all, int64; sample and head likewise, the head as int32.
        e: its values' columns.
        exists, within: which of a state's numbers exist, and where they lie in [D, E]: [BLOCK_E, BLOCK_D].
    """
    place = tl.program_id(1).to(tl.int64)
    sample, head = place // H, (place % H).to(tl.int32)
    e, d = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    exists, within = (e < E)[:, None] & (d < D)[None, :], d[None, :] * E + e[:, None]
    return place, sample, head, e, exists, within


@triton.jit
def load_totals(totals, sample, chunk, length, head, heads, C: tl.constexpr, DECAYS: tl.constexpr):
    """Log2 of what is left at each token of the state before the chunk [C], and at its last one.

    Behind the last token nothing more decays.
    """
    if DECAYS:
        t = tl.minimum(chunk * C + tl.arange(0, C), length - 1)
        end = tl.minimum(chunk * C + C, length) - 1
        total = tl.load(totals + (sample * length + t) * heads + head)
        return total, tl.load(totals + (sample * length + end) * heads + head)
    return tl.zeros([C], tl.float32), 0.0


@triton.jit
def between(pairs, total, STRICT: tl.constexpr, DECAYS: tl.constexpr, C: tl.constexpr):
    """Pairs of tokens [C, C] times the decay from the second to the first; 0 where that comes before it.

    STRICT: 0 also for a token with itself.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if DECAYS:
        pairs *= tl.exp2(total[:, None] - total[None, :])
    return tl.where(i > j if STRICT else i >= j, pairs, 0.0)


@triton.jit
def unit_lower_inverse(below, C: tl.constexpr):
    """The inverse of the identity plus `below`, fp32 [C, C] with nothing on and above its diagonal.

    Blocks on the diagonal by substitution; then two and two are joined: with D the inverse of a matrix without the
    blocks L that lie between the two, that with them is D - D L D.

    Args:
        below: the matrix.
        C: 64.
    """
    i, r = tl.arange(0, C), tl.arange(0, SOLVED)
    mine = (i // SOLVED)[:, None] == tl.arange(0, C // SOLVED)[None, :]
    blocks = tl.sum(tl.where(mine[:, :, None], tl.reshape(below, [C, C // SOLVED, SOLVED]), 0.0), 1)
    blocks = tl.reshape(blocks, [C // SOLVED, SOLVED, SOLVED])
    inverse = tl.zeros_like(blocks) + (r[:, None] == r[None, :]).to(tl.float32)[None]
    for step in range(1, SOLVED):
        here = (r == step)[None, :, None]
        row = tl.sum(tl.where(here, blocks, 0.0), 1)
        known = tl.sum(row[:, :, None] * inverse, 1)
        inverse = tl.where(here, inverse - known[:, None, :], inverse)
    inverse = tl.reshape(inverse, [C, SOLVED])[:, None, :]
    inverse = tl.reshape(tl.where(mine[:, :, None], inverse, 0.0), [C, C])
    for join in tl.static_range(2):
        of, other = i[:, None] // (SOLVED << join), i[None, :] // (SOLVED << join)
        joined = (of // 2 == other // 2) & (of != other)
        left = product_tf32(inverse, tl.where(joined, below, 0.0))
        inverse -= product_tf32(left, inverse)
    return inverse
