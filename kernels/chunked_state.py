"""Parts that the plain torch forms of the stateful ops share: a sequence in chunks, and decay between its positions.

Suffixes: b batch, h head, t position, n chunk, c and i, j position in a chunk, d key dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def to_chunks(x_bthd: Tensor, size: int) -> Tensor:
    """Cut [b, t, h, d] into [b, h, n, size, d]; the zeros at the end neither decay nor write."""
    missing = -x_bthd.shape[1] % size
    return pad(x_bthd, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, size))


def pair_decay(total_bhncd: Tensor) -> Tensor:
    """Give e^(G_i - G_j) for j <= i, zero above, of running sums G of log decay: [b, h, n, i, j, d]."""
    size = total_bhncd.shape[-2]
    above = torch.ones(size, size, dtype=torch.bool, device=total_bhncd.device).triu(1)
    # Masked before exp: above the diagonal the exponent is positive, and inf * 0 in the backward pass would be nan.
    return (total_bhncd[..., :, None, :] - total_bhncd[..., None, :, :]).masked_fill(above[..., None], -torch.inf).exp()
