"""What Based's Triton kernels share: where a tile's tokens lie, and how a state is kept.

A state sums features of tokens times their values. A product of two numbers of a token is in it once, as x_i x_j and
x_j x_i are the same: the rows of i = 0 are those of j = 0, 1, ...; those of i = 1 of j = 1, 2, ...; and so on. Behind
them come the rows of the numbers themselves, and last one of the values alone. Behind all rows [F, E] come, for the
sum of weights, the same sums without values [F].
"""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import triton
import triton.language as tl


@triton.jit
def place_rows(left, j, W: tl.constexpr):
    """Rows of a state that have the products of the numbers `left` and j.

    For `left` = W they are those of the numbers j themselves, for W + 1 and j = 0 it is that of the values alone.
    """
    low, high = tl.minimum(left, j), tl.maximum(left, j)
    return tl.where(left < W, low * W - low * (low - 1) // 2 + high - low, W * (W + 1) // 2 + (left - W) * W + j)


@triton.jit
def place_tokens(t, place, length, sample_stride, time_stride, H: tl.constexpr):
    """Of the tokens t of one head of a sample: their places among [rows, H], as int64, and whether they exist."""
    sample, head = (place // H).to(tl.int64), place % H
    return (sample * sample_stride + t.to(tl.int64) * time_stride) * H + head, t < length


@triton.jit
def load_left(x, at, valid, left, root, W: tl.constexpr):
    """The tokens' numbers `left` times root, in fp32; ones from `left` = W on."""
    numbers = tl.load(x + at * W + left, mask=valid & (left < W), other=0.0).to(tl.float32) * root
    return tl.where(left < W, numbers, 1.0)


@triton.jit
def load_state_rows(
    state, left, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr
):
    """A state's rows of `left`: [BLOCK_W, BLOCK_E], and of the sum of weights: [BLOCK_W]."""
    j, e = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_E)
    row = place_rows(left, j, W)
    rows = tl.load(state + row[:, None] * E + e[None, :], mask=(j < W)[:, None] & (e < E)[None, :], other=0.0)
    return rows, tl.load(state + F * E + row, mask=j < W, other=0.0)


@triton.jit
def load_state_alone(state, E: tl.constexpr, F: tl.constexpr, BLOCK_E: tl.constexpr):
    """A state's row of the values alone: [BLOCK_E], and its number for the sum of weights."""
    e, row = tl.arange(0, BLOCK_E), F - 1
    return tl.load(state + row * E + e, mask=e < E, other=0.0), tl.load(state + F * E + row)


@triton.jit
def load_factors(sums, falls, at, valid):
    """One over the sums of weights, and what their gradients are times the sums; see `triton_backward`."""
    return 1.0 / tl.load(sums + at, mask=valid, other=1.0), tl.load(falls + at, mask=valid, other=0.0)
