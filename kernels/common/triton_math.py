"""Arithmetic shared by the Triton kernels.

Only modules named `triton_*` import Triton, and only these modules import this one. References work without Triton.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import os
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""True if kernels run in Triton's interpreter on the CPU."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

MAX_INT32 = tl.constexpr(2**31 - 1)


@triton.jit
def product(a, b):
    """Matrix product of tiles, accumulated in fp32, never in TF32.

    The interpreter multiplies bf16 tiles incorrectly, so there the tiles are converted to fp32, which is exact.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def product_tf32(a, b):
    """Matrix product of fp32 tiles, accumulated in fp32; on a GPU the inputs are rounded to TF32."""
    return tl.dot(a, b, input_precision="ieee" if INTERPRETED else "tf32")


@triton.jit
def product_int8(a, b):
    """Matrix product of int8 tiles, exact in int32."""
    return tl.dot(a, b, out_dtype=tl.int32)


@triton.jit
def load_rows(base, index, valid, stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of a matrix by index: [len(index), BLOCK_D], zero where not valid and beyond HEAD_DIM.

    Args:
        base: pointer to element (0, 0).
        index: int, indices of the rows.
        valid: bool, mask as long as `index`.
        stride: number of elements from one row to the next.
    """
    d = tl.arange(0, BLOCK_D)
    pointers = base + index.to(tl.int64)[:, None] * stride + d[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    return tl.load(pointers, mask=valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(base, index, valid, stride, x, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a tile [len(index), BLOCK_D] to rows of a matrix in its dtype. Arguments as in `load_rows`."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + index.to(tl.int64)[:, None] * stride + d[None, :]
    if HEAD_DIM == BLOCK_D:
        tl.store(pointers, x.to(base.dtype.element_ty), mask=valid[:, None])
    else:
        tl.store(pointers, x.to(base.dtype.element_ty), mask=valid[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def load_token_scalars(x, rows, valid, head, heads):
    """Load one number per token for a head from [rows, heads]: fp32 [C], 0 where not valid."""
    return tl.load(x + rows * heads + head, mask=valid, other=0.0).to(tl.float32)


class Tiles(NamedTuple):
    """Tile sizes and launch options of one kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def launch(self) -> dict[str, int | None]:
        """Return the launch options for Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


MIN_TILE = 16
"""Minimum size of a tile's dimension in `tl.dot`."""


def tile(size: int, max_size: int | None = None) -> int:
    """Return the tile width for a dimension: a power of two of at least 16, at most `max_size`."""
    padded = max(MIN_TILE, next_power_of_two(size))
    return padded if max_size is None else min(padded, max_size)


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's GPU; 2 for a tensor on the CPU."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def on_hopper(x: Tensor) -> bool:
    """Return True if the tensor's GPU is a Hopper, the only generation with wgmma instructions."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Context manager that makes the tensor's GPU the current device, on which Triton launches kernels."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
