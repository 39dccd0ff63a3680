"""Short convolution in plain torch: the definition, on any device.

Suffixes: t position, b batch, u unit, w feature of a unit, k tap, or row before x.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.attention_math import upcast

EPSILON = 1e-6
"""Added to the squared norm of a vector, as in the authors' code of DeltaNet."""


def short_convolution(
    x_tbuw: Tensor,
    before_kbuw: Tensor,
    weight_uwk: Tensor,
    bias_uw: Tensor | None,
    widths: Sequence[int],
    unit_length: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Compute `interface.short_convolution`, which checks the arguments.

    Returns:
        One tensor [b, t, u, width] per part, contiguous, in x's dtype.
    """
    dtype = upcast(x_tbuw).dtype
    y_tbuw = convolve(x_tbuw.to(dtype), before_kbuw.to(dtype), weight_uwk.to(dtype))
    if bias_uw is not None:
        y_tbuw = y_tbuw + bias_uw.to(dtype)
    parts = F.silu(y_tbuw).split(list(widths), -1)
    parts = tuple(normalised(y) if unit else y for y, unit in zip(parts, unit_length, strict=True))
    return tuple(y.transpose(0, 1).to(x_tbuw.dtype).contiguous() for y in parts)


def convolve(x_tbuw: Tensor, before_kbuw: Tensor, weight_uwk: Tensor) -> Tensor:
    """Causal convolution [t, b, u, w]: the sum over j of weight[..., taps - 1 - j] * x[t - j].

    `before_kbuw` holds the rows before x.
    """
    t, padded_tbuw = len(x_tbuw), torch.cat([before_kbuw, x_tbuw])
    out_tbuw = padded_tbuw[:t] * weight_uwk[..., 0]
    for tap in range(1, weight_uwk.shape[-1]):
        out_tbuw = out_tbuw + padded_tbuw[tap : tap + t] * weight_uwk[..., tap]
    return out_tbuw


def normalised(x: Tensor) -> Tensor:
    """Divide the vectors of the last dimension by their L2 norm."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
