"""The short causal convolution that many stateful mixers begin with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.states import rows_before


def causal_convolution(x_tbuw: Tensor, weight_uwk: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Depthwise causal convolution over the first dimension.

    Args:
        x_tbuw: [t, b, u, w].
        weight_uwk: [u, w, kernel]; the last tap meets the own position.
        group: ranks that hold the other parts of the sequence, in order; None: x is the whole of it.

    Returns:
        [t, b, u, w]: at t the sum over j of weight[..., kernel-1-j] * x[t-j], with zeros before the sequence.
    """
    t, kernel = x_tbuw.shape[0], weight_uwk.shape[-1]
    if group is None or kernel == 1:
        padded = F.pad(x_tbuw, (0, 0, 0, 0, 0, 0, kernel - 1, 0))
    else:
        padded = torch.cat([rows_before(x_tbuw, kernel - 1, group), x_tbuw])
    out = padded[:t] * weight_uwk[..., 0]
    for tap in range(1, kernel):
        out = out + padded[tap : tap + t] * weight_uwk[..., tap]
    return out
