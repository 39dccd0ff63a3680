"""The short convolution's Triton form: two operators of torch.library, which torch.compile does not look into.

A function of autograd ties them together. `torch.library.custom_op` would tie them too, but what it wraps around each
call takes 70 us of Python for forward and backward, and small layers wait for Python. Importing this needs no Triton;
calling does.
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
    """Arguments as in `interface.short_convolution`, checked there, and without an obstacle."""
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
        inputs = ctx.saved_tensors  # under recompute they may be asked for once only
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
    """Arguments as in `short_convolution_triton`. Returns [b, t, u, width] each, contiguous, in x's dtype."""
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
    """Gradients of x, before, weight and bias, dense, each in its tensor's dtype; that of no bias is empty.

    `gradients` are those of the parts; the rest as in `short_convolution_triton`.
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
    """Make it an operator; `fake` gives results of the right shape for tensors without data."""
    qualified = f"selectron::{name}"
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(qualified, ("cpu", "cuda"), function)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.selectron, name).default


forward_operator = _register("short_convolution", _forward, _fake_forward)
backward_operator = _register("short_convolution_backward", _backward, _fake_backward)
