"""Parameters that a 16-bit run uses in fp32 in the forward pass: those that determine a state's decay and step size.

In bf16 a number such as log(A) or a step's bias has a relative error of up to 2^-9. After the exponential, the decay or
step has an error of some per cent and changes in equally large jumps. The mixers' authors keep such parameters in
fp32. Optimizers and their wrappers (Megatron's buffers, DeepSpeed's flat groups, ZeRO-3's shards) take a model of one
dtype. So the parameter itself has the run's dtype, and the optimizer has its usual fp32 copy. `fp32_values` are that
copy, complete on every rank. `optim.fp32_values` updates them after each step, and checkpoints store them as the
parameter. Gradients are those of the parameter, rounded to its dtype like all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def keep_fp32_values(parameter: torch.nn.Parameter) -> None:
    """Attach fp32 values to a 16-bit parameter. An fp32 parameter needs none."""
    if parameter.dtype.itemsize < torch.float32.itemsize:
        parameter.fp32_values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)  # type: ignore[attr-defined]


def fp32_values(parameter: Tensor) -> Tensor | None:
    """Return the fp32 values attached to a parameter, of its shape, or None."""
    values: Tensor | None = getattr(parameter, "fp32_values", None)
    return values


def stored(parameter: Tensor) -> Tensor:
    """Return the tensor that checkpoints store for a parameter: its fp32 values if it has any, else itself."""
    values = fp32_values(parameter)
    return parameter if values is None else values


def with_fp32_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have fp32 values, without duplicates."""
    found = {id(parameter): parameter for parameter in parameters if fp32_values(parameter) is not None}
    return list(found.values())


def in_fp32(parameter: Tensor) -> Tensor:
    """Return a parameter as the forward pass uses it: its fp32 values if any. The gradient goes to the parameter."""
    values = fp32_values(parameter)
    if values is None:
        return parameter
    values_in_fp32: Tensor = _ToFP32.apply(parameter, values)
    return values_in_fp32


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter and its fp32 values, if it has any."""
    with torch.no_grad():
        parameter.copy_(values)
        if (fp32 := fp32_values(parameter)) is not None:
            fp32.copy_(values)


class _ToFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return values.clone()  # the optimizer overwrites `values`

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient.to(ctx.dtype), None
