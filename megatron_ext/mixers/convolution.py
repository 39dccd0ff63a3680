"""The short causal convolution that many stateful mixers begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.mixers.past import Past


def causal_convolution(x_tbuw: Tensor, weight_uwk: Tensor, past: Past) -> Tensor:
    """Depthwise causal convolution over the first dimension.

    Args:
        x_tbuw: [t, b, u, w].
        weight_uwk: [u, w, kernel]; the last tap meets the own position.
        past: what lies before x.

    Returns:
        [t, b, u, w]: at t the sum over j of weight[..., kernel-1-j] * x[t-j], with zeros before the sequence.
    """
    return convolve(rows_before(x_tbuw, weight_uwk, past), x_tbuw, weight_uwk)


def rows_before(x_tbuw: Tensor, weight_uwk: Tensor, past: Past) -> Tensor:
    """The rows before x that its convolution sees, [kernel - 1, b, u, w]; see `causal_convolution`."""
    return past.rows_before("convolution", x_tbuw, weight_uwk.shape[-1] - 1)


def convolve(before_kbuw: Tensor, x_tbuw: Tensor, weight_uwk: Tensor) -> Tensor:
    """The convolution of x with these rows before it; see `causal_convolution`."""
    t, padded = len(x_tbuw), torch.cat([before_kbuw, x_tbuw])
    out = padded[:t] * weight_uwk[..., 0]
    for tap in range(1, weight_uwk.shape[-1]):
        out = out + padded[tap : tap + t] * weight_uwk[..., tap]
    return out
