"""Triton implementation of the short convolution: two operators of torch.library, opaque to torch.compile.

An autograd function connects them. `torch.library.custom_op` could do this, but its wrappers take 70 us of Python per
forward and backward call, and small layers are bound by Python. Triton is imported only when an operator is called.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def short_convolution_triton(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    unit_length: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Compute `interface.short_convolution` with Triton. The caller has checked that it supports them."""
    return _Convolution.apply(widths, unit_length, x, before, weight, bias)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, widths: Sequence[int], unit_length: Sequence[bool], *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.unit_length = unit_length
        return tuple(forward_operator(*inputs, widths, unit_length))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # activation checkpointing allows reading them only once
        *found, dbias = backward_operator(gradients, *inputs, ctx.unit_length)
        return None, None, *found, None if inputs[-1] is None else dbias


def _forward(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    unit_length: Sequence[bool],
) -> list[Tensor]:
    """Return a contiguous [b, t, u, width] tensor per part in x's dtype. Arguments as in `short_convolution_triton`."""
    from kernels.short_convolution import triton_launch

    return triton_launch.forward(x, before, weight, bias, tuple(widths), tuple(unit_length))


def _fake_forward(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    unit_length: Sequence[bool],
) -> list[Tensor]:
    length, batch, units, _ = x.shape
    return [x.new_empty(batch, length, units, width) for width in widths]


def _backward(
    gradients: Sequence[Tensor],
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    unit_length: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, before, weight and bias, contiguous, in their tensors' dtypes; empty without a bias.

    `gradients` are those of the parts. The other arguments are as in `short_convolution_triton`.
    """
    from kernels.short_convolution import triton_launch

    return triton_launch.backward(gradients, x, before, weight, bias, tuple(unit_length))


def _fake_backward(
    gradients: Sequence[Tensor],
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    unit_length: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dbefore, dweight = (y.new_empty(y.shape) for y in (x, before, weight))
    return dx, dbefore, dweight, weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator; `fake` returns outputs of the right shape for fake tensors."""
    qualified = f"selectron::{name}"
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(qualified, ("cpu", "cuda"), function)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.selectron, name).default


forward_operator = _register("short_convolution", _forward, _fake_forward)
backward_operator = _register("short_convolution_backward", _backward, _fake_backward)
