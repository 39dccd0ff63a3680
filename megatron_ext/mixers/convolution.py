"""The rows before those given, which the short causal convolution of many stateful mixers sees."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.mixers.past import Past


def rows_before(x_tbuw: Tensor, weight_uwk: Tensor, past: Past) -> Tensor:
    """The rows before x that its convolution sees, [kernel - 1, b, u, w]; zeros before the sequence.

    Args:
        x_tbuw: [t, b, u, w].
        weight_uwk: [u, w, kernel].
        past: what lies before x.
    """
    return past.rows_before("convolution", x_tbuw, weight_uwk.shape[-1] - 1)
