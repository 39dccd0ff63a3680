"""Tile of states held by one warp: its distribution over the threads (lanes), loads and sums.

Every token needs sums over the state elements and sums over channels, and communication between lanes is expensive.
Each lane therefore holds several state elements and several channels. A tile is [NR, ER, NL, EL]: the last two
dimensions are the warp's 32 lanes, and the first two are the elements per lane. State element n has the indices
n // NL (of NR) and n % NL (of NL). Channel e of the block has the indices e // EL (of ER) and e % EL (of EL). Only sums
cross lanes. Values that depend only on the channel are [1, ER, NL, EL], and those that depend only on n are
[NR, 1, NL, EL]; each lane loads its own copy.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl


@triton.jit
def tile_position(unit, NR: tl.constexpr, ER: tl.constexpr, NL: tl.constexpr, EL: tl.constexpr):
    """Return the state elements and channels of each lane.

    Args:
        unit: 1, as a run-time value. If the compiler knew the value, it would load contiguous memory in a layout of its
            own, and convert each token's inputs to this tile's layout through shared memory.

    Returns:
        n: [NR, 1, NL, EL], state elements, int64.
        e: [1, ER, NL, EL], channels of the block, int64.
        n_writer, e_writer: bool [1, 1, NL, EL], True in one lane among those with the same n (or e), which writes.
    """
    row = tl.arange(0, NL)[None, None, :, None]
    column = tl.arange(0, EL)[None, None, None, :]
    n = tl.arange(0, NR)[:, None, None, None] * NL + row.to(tl.int64) * unit
    e = tl.arange(0, ER)[None, :, None, None] * EL + column.to(tl.int64) * unit
    n, e = tl.broadcast_to(n, (NR, 1, NL, EL)), tl.broadcast_to(e, (1, ER, NL, EL))
    n_writer = tl.broadcast_to(column == 0, (1, 1, NL, EL))
    return n, e, n_writer, tl.broadcast_to(row == 0, (1, 1, NL, EL))


@triton.jit
def has_channel(e, count, WHOLE: tl.constexpr):
    """Return the mask of a block's `count` existing channels. If WHOLE, it is constant, so accesses are unmasked."""
    if WHOLE:
        return tl.full(e.shape, True, tl.int1)
    return e < count


@triton.jit
def load_float(pointers, valid):
    """Load in fp32, zero where not valid."""
    return tl.load(pointers, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def load_token(x, dt, B, row, valid, exists, n, e, channels, B_stride):
    """Load a token's inputs for the block. For an invalid token they are zeros, which leave the state unchanged.

    Args:
        x, dt: pointers to the block's first channel in row 0 of [rows, channels].
        B: pointer to the group's first element in row 0; B_stride: elements per row.
        valid: bool.
        exists: bool [1, ER, NL, EL], mask of the block's channels.

    Returns:
        x, dt [1, ER, NL, EL] and B [NR, 1, NL, EL], fp32.
    """
    x_t = load_float(x + row * channels + e, exists & valid)
    dt_t = load_float(dt + row * channels + e, exists & valid)
    return x_t, dt_t, load_float(B + row * B_stride + n, valid)


@triton.jit
def sum_over_states(tile):
    """Sum [NR, ER, NL, EL] to [1, ER, NL, EL], equal in all lanes of a channel."""
    total = tl.sum(tl.sum(tile, 0, keep_dims=True), 2, keep_dims=True)
    return tl.broadcast_to(total, (1, tile.shape[1], tile.shape[2], tile.shape[3]))


@triton.jit
def sum_over_channels(tile):
    """Sum [NR, ER, NL, EL] to [NR, 1, NL, EL], equal in all lanes of a state element."""
    total = tl.sum(tl.sum(tile, 1, keep_dims=True), 3, keep_dims=True)
    return tl.broadcast_to(total, (tile.shape[0], 1, tile.shape[2], tile.shape[3]))
