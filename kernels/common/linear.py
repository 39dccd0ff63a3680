"""Matrix product of 16-bit inputs with an fp32 result."""

from typing import Any

import torch
from torch import Tensor

from kernels.common.dispatch import on_gpu


class _LinearToFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


def linear_to_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a linear layer with fp32 accumulation and an fp32 result.

    Args:
        x: [..., n], any floating dtype.
        weight: [m, n] in x's dtype.

    Returns:
        [..., m] in fp32 (float64 for float64). For 16-bit inputs on a GPU, the product runs on tensor cores, and the
        incoming gradient is rounded to the inputs' dtype.
    """
    if on_gpu(x) and x.dtype in (torch.bfloat16, torch.float16):
        return _LinearToFP32.apply(x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide))
