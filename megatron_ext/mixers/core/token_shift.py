"""RWKV's token shift: interpolation between the hidden states of each token and of the previous token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.fusion import fused
from megatron_ext.parallel.parameters import Initializer, by_channel


@fused
def mixtures(
    x_tbh: Tensor, before_1bh: Tensor, mu_ih: Tensor, offsets_itbh: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Interpolate between each token and the previous token with several weights: x_t + (x_{t-1} - x_t) * mu.

    Args:
        x_tbh: hidden states [t, b, hidden].
        before_1bh: hidden state before the first token; see `SequenceHistory.previous_rows`.
        mu_ih: weights of the previous token [i, hidden], for i mixtures.
        offsets_itbh: token-dependent addition to the weights [i, t, b, hidden], or None.

    Returns:
        The mixtures, [t, b, hidden] each.
    """
    difference_tbh = torch.cat([before_1bh, x_tbh[:-1]]) - x_tbh
    share_itbh = mu_ih[:, None, None] if offsets_itbh is None else mu_ih[:, None, None] + offsets_itbh
    return tuple(x_tbh + difference_tbh * share for share in share_itbh.unbind())


def ramp(exponent: float, lowered: float = 0.0) -> Initializer:
    """Return an initializer of mu that decreases with the channel.

    Channel c of C gets the value 1 - (c/C)^exponent - lowered, as in the authors' code (github.com/BlinkDL/RWKV-LM).
    """
    return by_channel(lambda channel: 1 - (channel / len(channel)) ** exponent - lowered)


def ramps(*initializers: Initializer) -> Initializer:
    """Return an initializer that fills row i of a matrix with the i-th of the given initializers."""

    def fill(whole: Tensor, generator: torch.Generator) -> None:
        for row, initializer in zip(whole, initializers, strict=True):
            initializer(row, generator)

    return fill


def layers_left(layer_number: int, num_layers: int) -> float:
    """Return the fraction of the model's layers from this layer to the last: 1 for the first layer, number 1."""
    return 1 - (layer_number - 1) / num_layers
