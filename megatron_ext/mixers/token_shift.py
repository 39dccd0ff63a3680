"""RWKV's token shift: each token's hidden state mixed with that of the token before it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fusion import fused
from megatron_ext.parallel.parameters import Initializer, by_channel


@fused
def mixtures(x_tbh: Tensor, before_1bh: Tensor, mu_ih: Tensor, more_itbh: Tensor | None = None) -> tuple[Tensor, ...]:
    """Each token mixed with the one before it, in some ways: x_t + (x_{t-1} - x_t) * mu.

    Args:
        x_tbh: hidden states [t, b, hidden].
        before_1bh: the row before the first, see `Past.rows_before`.
        mu_ih: share of the token before, by channel, in each of the mixtures.
        more_itbh: what is added to it, by the token.

    Returns:
        The mixtures, [t, b, hidden] each.
    """
    to_previous_tbh = torch.cat([before_1bh, x_tbh[:-1]]) - x_tbh
    share_itbh = mu_ih[:, None, None] if more_itbh is None else mu_ih[:, None, None] + more_itbh
    return tuple(x_tbh + to_previous_tbh * share for share in share_itbh.unbind())


def ramp(exponent: float, lowered: float = 0.0) -> Initializer:
    """Initial mu, from the token before in the first channel to the token itself in the last ones.

    In channel c of C it is 1 - (c/C)^exponent - lowered, as in the authors' code (github.com/BlinkDL/RWKV-LM).
    """
    return by_channel(lambda channel: 1 - (channel / len(channel)) ** exponent - lowered)


def ramps(*of_rows: Initializer) -> Initializer:
    """Each row its own."""

    def fill(whole: Tensor, generator: torch.Generator) -> None:
        for row, start in zip(whole, of_rows, strict=True):
            start(row, generator)

    return fill


def layers_left(layer_number: int, num_layers: int) -> float:
    """Share of the model's layers that are not below this one: 1 for the first, which has the number 1."""
    return 1 - (layer_number - 1) / num_layers
