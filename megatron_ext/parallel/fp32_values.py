"""Parameters that the forward pass takes in fp32 in a run of 16 bits: those that a state's decay and step are made of.

A bf16 number near log(A) or a step's bias is up to 2^-9 off, which the exponential turns into a decay or step that is
some per cent off and moves in jumps as large. Authors keep such parameters in fp32. Optimizers and their wrappers
(Megatron's buffers, DeepSpeed's flat groups, ZeRO-3's shares) take a model of one dtype, so the parameter itself stays
in the run's, with the optimizer's fp32 copy of it as ever. Its `fp32_values` are that copy, whole on every rank:
`optim.fp32_values` brings them up to date after each update, and checkpoints hold them as the parameter. Gradients are
those of the parameter, rounded to its dtype as all others are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def keep_fp32_values(parameter: torch.nn.Parameter) -> None:
    """Let a parameter of 16 bits have fp32 values beside it; one in fp32 is its own."""
    if parameter.dtype.itemsize < torch.float32.itemsize:
        parameter.fp32_values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)  # type: ignore[attr-defined]


def fp32_values(parameter: Tensor) -> Tensor | None:
    """The fp32 tensor beside a parameter, of its shape; None: it has none."""
    values: Tensor | None = getattr(parameter, "fp32_values", None)
    return values


def stored(parameter: Tensor) -> Tensor:
    """What of a parameter a checkpoint holds: its fp32 values, or else itself."""
    values = fp32_values(parameter)
    return parameter if values is None else values


def with_fp32_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of some parameters that have fp32 values beside them, each once."""
    found = {id(parameter): parameter for parameter in parameters if fp32_values(parameter) is not None}
    return list(found.values())


def in_fp32(parameter: Tensor) -> Tensor:
    """A parameter as the forward pass takes it: by its fp32 values where it has any, and its gradient to itself."""
    values = fp32_values(parameter)
    if values is None:
        return parameter
    taken: Tensor = _Taken.apply(parameter, values)
    return taken


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter values, and its fp32 values, if it has any."""
    with torch.no_grad():
        parameter.copy_(values)
        if (own := fp32_values(parameter)) is not None:
            own.copy_(values)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return values.clone()  # the optimizer writes over `values`

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient.to(ctx.dtype), None
