"""Based as linear attention: a Taylor feature map whose inner products are the attention weights.

Arora et al. 2024, "Simple linear attention language models balance the recall-throughput tradeoff" (arXiv 2402.18668).

Suffixes: b batch, h head, t position, f width of queries and keys, d features, e value dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.common.fusion import fused

Scan = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal linear attention of scale 1: queries and keys [b, t, h, d], values [b, t, h, e] to sums [b, t, h, e]."""


def by_features(
    q_bthf: Tensor,
    k_bthf: Tensor,
    v_bthe: Tensor,
    scan: Scan,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute `based` by linear attention over features.

    Args:
        q_bthf: queries [b, t, h, f].
        k_bthf: keys [b, t, h, f].
        v_bthe: values [b, t, h, e].
        scan: causal linear attention, which may start from a state. Its values have an appended 1, which sums up the
            weights.
        dtype: dtype of its inputs.

    Returns:
        o [b, t, h, e] in the values' dtype.
    """
    sums_bthx = scan(*_with_features(q_bthf, k_bthf, v_bthe, dtype))
    return _divide_by_weights(sums_bthx, v_bthe.shape[-1], v_bthe.dtype)


def num_features(width: int) -> int:
    """Return the number of features of a query or key of width f: 1 + f + f (f + 1) / 2."""
    return 1 + width + width * (width + 1) // 2


@fused
def _with_features(q_bthf: Tensor, k_bthf: Tensor, v_bthe: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (taylor_features(x, dtype) for x in (q_bthf, k_bthf))
    return q, k, pad(v_bthe.to(dtype), (0, 1), value=1.0)


def taylor_features(x_bthf: Tensor, dtype: torch.dtype) -> Tensor:
    """Map [..., f] to features [..., `num_features`(f)] whose inner products are 1 + s + s^2 / 2, s = x.y / sqrt(f).

    Each product x_i x_j occurs once, because it equals x_j x_i. Products are built by rolling x by each distance j - i,
    because an index gather would have a slow scatter as its gradient.

    Args:
        x_bthf: queries or keys [..., f].
        dtype: dtype of the features, which are computed in fp32 or wider.
    """
    width = x_bthf.shape[-1]
    x_bthf = x_bthf.to(torch.promote_types(dtype, torch.float32)) * width**-0.25
    pairs = [x_bthf.square() * 0.5**0.5]
    pairs += [x_bthf * x_bthf.roll(distance, -1) for distance in range(1, (width + 1) // 2)]
    if width % 2 == 0:
        left, right = x_bthf.chunk(2, -1)
        pairs.append(left * right)
    ones = x_bthf.new_ones(*x_bthf.shape[:-1], 1)
    # Each part is converted separately, so that compiled code writes it directly to its place.
    return torch.cat([part.to(dtype) for part in (ones, x_bthf, *pairs)], -1)


@fused
def _divide_by_weights(sums_bthx: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Divide the weighted sums of values [..., :width] by the sum of weights after them: [..., width]."""
    sums_bthx = sums_bthx.to(torch.promote_types(sums_bthx.dtype, torch.float32))
    return (sums_bthx[..., :width] / sums_bthx[..., width : width + 1]).to(dtype)
