"""Helpers of the Hopper kernels, written in Gluon (Triton's language of explicit layouts and warps)."""

# mypy: ignore-errors
# Gluon has no types.

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GROUP_M = gl.constexpr(64)
"""Rows per warp group, equal to the rows of one wgmma instruction."""

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int8: gl.int8}


@lru_cache
def shared_layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile that is an operand of a matrix product."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], DTYPES[dtype])


def tile_descriptor(matrix: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Return the TMA descriptor that loads tiles [rows, width] of a contiguous matrix."""
    return TensorDescriptor.from_tensor(matrix, [rows, width], shared_layout(rows, width, matrix.dtype))
