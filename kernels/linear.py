"""A product of matrices of 16-bit numbers whose sums stay in fp32."""

from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import on_gpu


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
    """Features times a weight, summed and returned in fp32.

    Args:
        x: [..., n], of any floating dtype.
        weight: [m, n], of x's dtype.

    Returns:
        [..., m] in fp32; float64 for float64. For 16-bit inputs on a GPU by its matrix units, and the gradient that
        comes back is rounded to their dtype there.
    """
    if on_gpu(x) and x.dtype in (torch.bfloat16, torch.float16):
        return _LinearToFP32.apply(x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide))
