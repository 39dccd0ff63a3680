"""RWKV's token shift: each token's hidden state mixed with that of the token before it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.mixers.past import Past
from megatron_ext.parallel.parameters import Initializer, by_channel


def to_previous(x_tbh: Tensor, past: Past) -> Tensor:
    """What leads from each token to the one before it, x_{t-1} - x_t, where zeros stand before the first.

    Args:
        x_tbh: hidden states [t, b, hidden].
        past: what lies before them.

    Returns:
        [t, b, hidden]; x plus mu times it lies between the two tokens, at x where mu is 0.
    """
    return torch.cat([past.rows_before("hidden_states", x_tbh, 1), x_tbh[:-1]]) - x_tbh


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
