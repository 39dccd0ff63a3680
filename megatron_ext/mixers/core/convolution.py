"""Earlier rows that the short causal convolution of stateful mixers needs."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.mixers.core.history import SequenceHistory


def previous_rows(x_tbuw: Tensor, weight_uwk: Tensor, history: SequenceHistory) -> Tensor:
    """Return the rows before x that its convolution sees, [kernel - 1, b, u, w]; zeros before the sequence.

    Args:
        x_tbuw: input of the convolution [t, b, u, w].
        weight_uwk: weight of the convolution [u, w, kernel].
        history: access to the positions before x.
    """
    return history.previous_rows("convolution", x_tbuw, weight_uwk.shape[-1] - 1)
