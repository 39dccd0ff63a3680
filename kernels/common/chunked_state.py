"""Building blocks of the recurrent ops in plain torch: split a sequence into chunks, decay between positions.

Suffixes: b batch, h head, t position, n chunk, c and i, j position in a chunk, d key dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

VECTOR_DECAY_CHUNK_SIZE = 16
"""Chunk size for a decay per key feature. It is small because each pair of positions needs a number per feature."""


def to_chunks(x_bthd: Tensor, size: int) -> Tensor:
    """Split [b, t, h, d] into [b, h, n, size, d]. Zero padding at the end neither decays nor changes the state."""
    missing = -x_bthd.shape[1] % size
    return pad(x_bthd, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, size))


def pair_decay(total_c1: Tensor) -> Tensor:
    """Return e^(G_i - G_j) for j <= i and zero for j > i, with G the running sums of the log decay within a chunk.

    Args:
        total_c1: G, [..., c, 1].

    Returns:
        [..., i, j].
    """
    size = total_c1.shape[-2]
    above = torch.ones(size, size, dtype=torch.bool, device=total_c1.device).triu(1)
    # Masked before exp, because exponents above the diagonal are positive. Their exp may be inf, and inf * 0 in the
    # backward pass would be NaN.
    return (total_c1 - total_c1.mT).masked_fill(above, -torch.inf).exp()
