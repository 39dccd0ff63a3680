"""The tile of states that one warp holds: how it is dealt out to lanes, and what reads and sums it.

Every token asks for sums over the state's numbers and over channels, and what crosses lanes is dear. So a lane holds
some of both: a tile is [NR, ER, NL, EL], where the last two dimensions are the warp's 32 lanes and the first two what a
lane has. State number n is at n // NL, n % NL, channel e of the block at e // EL, e % EL. Only sums cross lanes: what
depends on the channel alone is [1, ER, NL, EL], what depends on n alone [NR, 1, NL, EL]; each lane reads its own.
"""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import triton
import triton.language as tl


@triton.jit
def place_in_tile(unit, NR: tl.constexpr, ER: tl.constexpr, NL: tl.constexpr, EL: tl.constexpr):
    """What each lane has.

    Args:
        unit: 1. The compiler must not know: it would deal neighbours in memory out to lanes in a way of its own, and
            move each token's numbers to this one through shared memory.

    Returns:
        n: [NR, 1, NL, EL], state numbers, int64.
        e: [1, ER, NL, EL], channels of the block, int64.
        n_writer, e_writer: bool [1, 1, NL, EL]: of the lanes with the same n, or the same e, the one that writes.
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
    """Which channels of a block exist: the first `count`, or all where WHOLE, and then the compiler needs no masks."""
    if WHOLE:
        return tl.full(e.shape, True, tl.int1)
    return e < count


@triton.jit
def load_float(pointers, valid):
    """In fp32, zero where not valid."""
    return tl.load(pointers, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def load_token(x, dt, B, row, valid, exists, n, e, channels, B_stride):
    """What a row has for the block; zeros, which leave a state as it is, where not valid.

    Args:
        x, dt: pointers to the block's first channel in row 0 of [rows, channels].
        B: pointer to the group's first number in row 0; B_stride: numbers in a row.
        valid: bool.
        exists: bool [1, ER, NL, EL], whether the block has the channel.

    Returns:
        x, dt [1, ER, NL, EL] and B [NR, 1, NL, EL], fp32.
    """
    x_t = load_float(x + row * channels + e, exists & valid)
    dt_t = load_float(dt + row * channels + e, exists & valid)
    return x_t, dt_t, load_float(B + row * B_stride + n, valid)


@triton.jit
def sum_over_states(tile):
    """[NR, ER, NL, EL] to [1, ER, NL, EL], the same in all lanes of a channel."""
    total = tl.sum(tl.sum(tile, 0, keep_dims=True), 2, keep_dims=True)
    return tl.broadcast_to(total, (1, tile.shape[1], tile.shape[2], tile.shape[3]))


@triton.jit
def sum_over_channels(tile):
    """[NR, ER, NL, EL] to [NR, 1, NL, EL], the same in all lanes of a state number."""
    total = tl.sum(tl.sum(tile, 1, keep_dims=True), 3, keep_dims=True)
    return tl.broadcast_to(total, (tile.shape[0], 1, tile.shape[2], tile.shape[3]))
