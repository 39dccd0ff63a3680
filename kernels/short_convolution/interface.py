"""Public interface of the short convolution: argument checks and choice of an implementation."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from kernels.common.dispatch import (
    check_any_floating,
    check_floating,
    check_shapes,
    choose_triton_or_reference,
    full_precision,
    triton_unsupported_reason,
)
from kernels.short_convolution import reference
from kernels.short_convolution.op import short_convolution_triton

Implementation = Literal["auto", "reference", "triton"]

MAX_TRITON_TAPS = 8
"""Maximum taps for the Triton implementation, which keeps as many rows of x in registers."""

MAX_TRITON_UNIT_LENGTH = 256
"""Maximum width of a normalised part for the Triton implementation, in which one warp holds the whole vector."""


def short_convolution(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    widths: Sequence[int],
    unit_length: Sequence[bool] | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, ...]:
    """SiLU of a depthwise causal convolution, split into parts; computed in fp32 (float64 for float64).

    Args:
        x: [t, b, u, w] (sequence, batch, units such as heads, features), any strides; fp32, bf16, fp16 or float64.
        before: the k - 1 rows before x, [k - 1, b, u, w] in x's dtype: zeros, or the last rows of the preceding input.
        weight: taps [u, w, k], any floating dtype; the last tap multiplies the current position.
        bias: [u, w], any floating dtype; None for none.
        widths: widths of the parts into which the features are split; they sum to w.
        unit_length: for each part, True to divide each unit's vector by its L2 norm, with 1e-6 added to the squared
            norm; None for no part.
        implementation: "reference"; "triton", for x contiguous in its last dimension, up to 8 taps and normalised parts
            up to 256 wide; "auto" for Triton on a GPU where it is supported, else reference.

    Returns:
        One tensor per part, contiguous [b, t, u, width], in x's dtype.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Gu, Dao 2023, "Mamba" (arXiv 2312.00752), section 3.4; unit length: Yang et al. 2024, "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484).
    """
    widths = list(widths)
    unit_length = [False] * len(widths) if unit_length is None else list(unit_length)
    _check(x, before, weight, bias, widths, unit_length)
    unsupported_reason = _unsupported_reason(x, weight, bias, widths, unit_length)
    chosen = choose_triton_or_reference("short_convolution", implementation, x, unsupported_reason)
    if chosen.name == "triton":
        return short_convolution_triton(x, before, weight, bias, widths, unit_length)
    with full_precision(x):
        return reference.short_convolution(x, before, weight, bias, widths, unit_length)


def _unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], unit_length: Sequence[bool]
) -> str | None:
    unsupported_reason = triton_unsupported_reason(x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if unsupported_reason is not None:
        return unsupported_reason
    if x.stride(-1) != 1:
        return f"x has stride {x.stride(-1)} in its last dimension: make that contiguous"
    if weight.shape[-1] > MAX_TRITON_TAPS:
        return f"weight has {weight.shape[-1]} taps: give at most {MAX_TRITON_TAPS}"
    widest = max(width * unit for width, unit in zip(widths, unit_length, strict=True))
    if widest > MAX_TRITON_UNIT_LENGTH:
        return f"widths has a normalised part of width {widest}: give at most {MAX_TRITON_UNIT_LENGTH}"
    return None


def _check(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    unit_length: Sequence[bool],
) -> None:
    if x.dim() != 4 or x.numel() == 0:
        raise ValueError(f"x has shape {list(x.shape)}: give [length, batch, units, width], all at least 1")
    if weight.dim() != 3 or weight.numel() == 0:
        raise ValueError(f"weight has shape {list(weight.shape)}: give [units, width, taps], all at least 1")
    unit_shape, taps = x.shape[2:], weight.shape[-1]
    expected = {"weight": (weight, (*unit_shape, taps)), "before": (before, (taps - 1, *x.shape[1:]))}
    if bias is not None:
        expected["bias"] = (bias, unit_shape)
    check_shapes(x, expected, main_name="x")
    check_floating(x=x, before=before)
    check_any_floating(**{name: tensor for name, (tensor, _) in expected.items()})
    if min(widths, default=0) < 1 or sum(widths) != unit_shape[1]:
        raise ValueError(
            f"widths is {list(widths)}: give whole numbers from 1 that sum to {unit_shape[1]}, the width of x"
        )
    if len(unit_length) != len(widths):
        raise ValueError(f"unit_length is {list(unit_length)}: give a bool for each of the {len(widths)} widths")
