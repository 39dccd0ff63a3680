"""Token addressing and state layout, shared by Based's Triton kernels.

A state is the sum over tokens of features times values, with a row [E] per feature. Features are the products x_i x_j,
the single elements x_i, and a constant. Each product occurs once, because x_i x_j equals x_j x_i. The rows are ordered:
i = 0 with j = 0, 1, ..., then i = 1 with j = 1, 2, ..., and so on, then the single elements, and last the constant. The
rows [F, E] are followed by the sums of the features alone, [F], for the sum of weights.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl


@triton.jit
def state_rows(left, j, W: tl.constexpr):
    """Return the state rows of the products of elements `left` and j.

    `left` = W selects the rows of the single elements j, and `left` = W + 1 with j = 0 the row of the constant feature.
    """
    low, high = tl.minimum(left, j), tl.maximum(left, j)
    return tl.where(left < W, low * W - low * (low - 1) // 2 + high - low, W * (W + 1) // 2 + (left - W) * W + j)


@triton.jit
def token_indices(t, sequence, length, sample_stride, time_stride, H: tl.constexpr):
    """Return the int64 positions in [rows, H] of one head's tokens t of a sample, and a mask of the existing ones."""
    sample, head = (sequence // H).to(tl.int64), sequence % H
    return (sample * sample_stride + t.to(tl.int64) * time_stride) * H + head, t < length


@triton.jit
def load_element(x, index, valid, left, root, W: tl.constexpr):
    """Load element `left` of each token times `root`, in fp32; 1 for `left` >= W."""
    features = tl.load(x + index * W + left, mask=valid & (left < W), other=0.0).to(tl.float32) * root
    return tl.where(left < W, features, 1.0)


@triton.jit
def load_state_rows(
    state, left, W: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Load a state's rows of `left` for the values, [BLOCK_W, BLOCK_E], and for the sum of weights, [BLOCK_W]."""
    j, e = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_E)
    row = state_rows(left, j, W)
    rows = tl.load(state + row[:, None] * E + e[None, :], mask=(j < W)[:, None] & (e < E)[None, :], other=0.0)
    return rows, tl.load(state + F * E + row, mask=j < W, other=0.0)


@triton.jit
def load_constant_row(state, E: tl.constexpr, F: tl.constexpr, BLOCK_E: tl.constexpr):
    """Load a state's row of the constant feature: the values [BLOCK_E], and a scalar for the sum of weights."""
    e, row = tl.arange(0, BLOCK_E), F - 1
    return tl.load(state + row * E + e, mask=e < E, other=0.0), tl.load(state + F * E + row)


@triton.jit
def load_factors(sums, neg_deltas, index, valid):
    """Load the reciprocal sums of weights, and -do.o (see `triton_backward`)."""
    return 1.0 / tl.load(sums + index, mask=valid, other=1.0), tl.load(neg_deltas + index, mask=valid, other=0.0)
