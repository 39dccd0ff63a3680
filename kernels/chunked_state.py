"""Parts that the plain torch forms of the stateful ops share: a sequence in chunks, and decay between its positions.

Suffixes: b batch, h head, t position, n chunk, c and i, j position in a chunk, d key dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK_SIZE_OF_VECTORS = 16
"""A decay a key feature makes a number for each pair of positions and feature."""


def to_chunks(x_bthd: Tensor, size: int) -> Tensor:
    """Cut [b, t, h, d] into [b, h, n, size, d]; the zeros at the end neither decay nor write."""
    missing = -x_bthd.shape[1] % size
    return pad(x_bthd, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, size))


def pair_decay(total_c1: Tensor) -> Tensor:
    """Give e^(G_i - G_j) for j <= i, zero above, G a chunk's running sums of log decay: [..., c, 1] to [..., i, j]."""
    size = total_c1.shape[-2]
    above = torch.ones(size, size, dtype=torch.bool, device=total_c1.device).triu(1)
    # Masked before exp: above the diagonal the exponent is positive, and inf * 0 in the backward pass would be nan.
    return (total_c1 - total_c1.mT).masked_fill(above, -torch.inf).exp()
