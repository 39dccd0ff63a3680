"""Chunk addressing, decays and the triangular inverse, shared by the gated delta rule's Triton kernels."""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import product_tf32

CHUNK = 64
"""Tokens per chunk."""

DIAGONAL_BLOCK = tl.constexpr(16)
"""Size of the diagonal blocks that are inverted row by row."""


@triton.jit
def split_program(program, chunks, heads):
    """Return a program's sample (int64), head and chunk, in a one-dimensional grid of samples * heads * chunks."""
    sequence, chunk = program // chunks, program % chunks
    return (sequence // heads).to(tl.int64), sequence % heads, chunk


@triton.jit
def rows_of_chunk(sample, chunk, length, C: tl.constexpr):
    """Return the indices of a chunk's tokens in [samples * length, ...], and a mask of the tokens that exist."""
    t = chunk * C + tl.arange(0, C)
    return sample * length + t, t < length


@triton.jit
def column_offsets(rows, valid, columns, head, heads, WIDTH: tl.constexpr):
    """Return the mask and the addresses of token columns in [rows, heads, WIDTH]: two tiles [C, columns]."""
    return valid[:, None] & (columns < WIDTH)[None, :], (rows * heads + head)[:, None] * WIDTH + columns[None, :]


@triton.jit
def transposed_column_offsets(rows, valid, columns, head, heads, WIDTH: tl.constexpr):
    """Return the transposes of `column_offsets`: two tiles [columns, C]."""
    return (columns < WIDTH)[:, None] & valid[None, :], (rows * heads + head)[None, :] * WIDTH + columns[:, None]


@triton.jit
def scan_position(H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the indices of a scan's program, for a grid of (blocks of E, samples * H) programs.

    Returns:
        sequence: index of the (sample, head) pair, int64; then the sample, int64, and the head, int32.
        e: value columns.
        state_mask, state_offsets: mask and addresses of the state's elements in [D, E]: [BLOCK_E, BLOCK_D].
    """
    sequence = tl.program_id(1).to(tl.int64)
    sample, head = sequence // H, (sequence % H).to(tl.int32)
    e, d = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    state_mask, state_offsets = (e < E)[:, None] & (d < D)[None, :], d[None, :] * E + e[:, None]
    return sequence, sample, head, e, state_mask, state_offsets


@triton.jit
def load_log_decays(log_decays, sample, chunk, length, head, heads, C: tl.constexpr, DECAYS: tl.constexpr):
    """Load the running sums of the log2 decay of a chunk's tokens [C], and the sum at the chunk's last token.

    Positions beyond the last token repeat its sum, so that they do not decay.
    """
    if DECAYS:
        t = tl.minimum(chunk * C + tl.arange(0, C), length - 1)
        end = tl.minimum(chunk * C + C, length) - 1
        log_decay = tl.load(log_decays + (sample * length + t) * heads + head)
        return log_decay, tl.load(log_decays + (sample * length + end) * heads + head)
    return tl.zeros([C], tl.float32), 0.0


@triton.jit
def mask_and_decay(pairs, log_decay, STRICT: tl.constexpr, DECAYS: tl.constexpr, C: tl.constexpr):
    """Multiply the products of token pairs (i, j), [C, C], by the decay from j to i. Set products with j > i to 0.

    If STRICT, also set the diagonal to 0.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if DECAYS:
        pairs *= tl.exp2(log_decay[:, None] - log_decay[None, :])
    return tl.where(i > j if STRICT else i >= j, pairs, 0.0)


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr):
    """Invert the identity plus `lower`, an fp32 [C, C] matrix that is zero on and above its diagonal.

    The diagonal blocks are inverted by substitution. Then pairs of adjacent blocks are joined, twice. Let D be the
    inverse of a pair of diagonal blocks, and L the block of `lower` that connects them. The inverse of the joined block
    is D - D L D.

    Args:
        lower: the matrix.
        C: 64.
    """
    i, r = tl.arange(0, C), tl.arange(0, DIAGONAL_BLOCK)
    in_block = (i // DIAGONAL_BLOCK)[:, None] == tl.arange(0, C // DIAGONAL_BLOCK)[None, :]
    blocks = tl.sum(tl.where(in_block[:, :, None], tl.reshape(lower, [C, C // DIAGONAL_BLOCK, DIAGONAL_BLOCK]), 0.0), 1)
    blocks = tl.reshape(blocks, [C // DIAGONAL_BLOCK, DIAGONAL_BLOCK, DIAGONAL_BLOCK])
    inverse = tl.zeros_like(blocks) + (r[:, None] == r[None, :]).to(tl.float32)[None]
    for step in range(1, DIAGONAL_BLOCK):
        is_row = (r == step)[None, :, None]
        row = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        correction = tl.sum(row[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - correction[:, None, :], inverse)
    inverse = tl.reshape(inverse, [C, DIAGONAL_BLOCK])[:, None, :]
    inverse = tl.reshape(tl.where(in_block[:, :, None], inverse, 0.0), [C, C])
    for join in tl.static_range(2):
        row_block, column_block = i[:, None] // (DIAGONAL_BLOCK << join), i[None, :] // (DIAGONAL_BLOCK << join)
        is_connection = (row_block // 2 == column_block // 2) & (row_block != column_block)
        left = product_tf32(inverse, tl.where(is_connection, lower, 0.0))
        inverse -= product_tf32(left, inverse)
    return inverse
