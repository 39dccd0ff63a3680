"""The short convolution's Triton form as two operators of torch.library: autograd does not look inside.

Importing this needs no Triton; calling does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def short_convolution_triton(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    unit_length: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Arguments as in `interface.short_convolution`, checked there, and without an obstacle."""
    return tuple(short_convolution_forward(x, before, weight, bias, widths, unit_length))


@torch.library.custom_op("selectron::short_convolution", mutates_args=())
def short_convolution_forward(
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


@short_convolution_forward.register_fake
def _(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    unit_length: Sequence[bool],
) -> list[Tensor]:
    length, batch, units, _ = x.shape
    return [x.new_empty(batch, length, units, width) for width in widths]


@torch.library.custom_op("selectron::short_convolution_backward", mutates_args=())
def short_convolution_backward(
    gradients: Sequence[Tensor],
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    unit_length: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, before, weight and bias, dense, each in its tensor's dtype; that of no bias is empty.

    `gradients` are those of the parts; the rest as in `short_convolution_forward`.
    """
    from kernels.short_convolution import triton_launch

    return triton_launch.backward(gradients, x, before, weight, bias, tuple(unit_length))


@short_convolution_backward.register_fake
def _(
    gradients: Sequence[Tensor],
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    unit_length: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dbefore, dweight = (y.new_empty(y.shape) for y in (x, before, weight))
    return dx, dbefore, dweight, weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, before, weight, bias, _, ctx.unit_length = inputs
    ctx.save_for_backward(x, before, weight, bias)
    ctx.parts = [y.shape for y in output]


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    x, before, weight, bias = ctx.saved_tensors
    given = [x.new_zeros(shape) if y is None else y for y, shape in zip(gradients, ctx.parts, strict=True)]
    dx, dbefore, dweight, dbias = short_convolution_backward(given, x, before, weight, bias, ctx.unit_length)
    return dx, dbefore, dweight, None if bias is None else dbias, None, None


short_convolution_forward.register_autograd(_backward, setup_context=_setup_context)
