"""Building blocks of the attention ops in plain torch.

The functions materialise a [tq, tk] array per head. They define the ops on any device and are too slow for long
sequences.

Shape suffixes: b batch, t query, s key, h query head, g key/value head, r query heads per key/value head, d and e head
dims. Matrix products are in full fp32; on CUDA this is torch's default (no TF32).
"""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scores and softmax: float64 for float64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """Convert to the dtype of scores and softmax, `compute_dtype`."""
    return x.to(compute_dtype(x))


def query_key_products(q_bthd: Tensor, k_bshd: Tensor) -> Tensor:
    """Compute q_t . k_s without a scale, accumulated in fp32 (float64 for float64).

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bshd: keys [b, tk, hkv, d]; query head h uses key head h // (hq // hkv).

    Returns:
        [b, hq, tq, tk], fp32 or float64.
    """
    q_btgrd = upcast(q_bthd).unflatten(2, (k_bshd.shape[2], -1))
    return torch.einsum("btgrd,bsgd->bgrts", q_btgrd, upcast(k_bshd)).flatten(1, 2)


def mix_values(weights_bhts: Tensor, v_bshe: Tensor) -> Tensor:
    """Compute the weighted sum of the values.

    Args:
        weights_bhts: [b, hq, tq, tk], fp32 or float64.
        v_bshe: values [b, tk, hkv, dv], any floating dtype.

    Returns:
        [b, tq, hq, dv] in v's dtype, accumulated in the dtype of the weights.
    """
    weights_bgrts = weights_bhts.unflatten(1, (v_bshe.shape[2], -1))
    out_btgre = torch.einsum("bgrts,bsge->btgre", weights_bgrts, v_bshe.to(weights_bhts.dtype))
    return out_btgre.flatten(2, 3).to(v_bshe.dtype)


def query_positions(q_bthd: Tensor, query_offset: int) -> Tensor:
    """Return the global position of each query, int64 [tq]."""
    return torch.arange(query_offset, query_offset + q_bthd.shape[1], device=q_bthd.device)


def causal_mask(q_bthd: Tensor, k_bshd: Tensor, query_offset: int, window: int | None = None) -> Tensor:
    """Return the causal mask, with an optional sliding window.

    Args:
        q_bthd: queries, for tq and device.
        k_bshd: keys, for tk.
        query_offset: global position of the first query.
        window: number of visible keys per query, including the key at the query's position; None for no limit.

    Returns:
        bool [tq, tk], True where the key is visible. Every query sees at least the key at its own position.
    """
    t = query_positions(q_bthd, query_offset)[:, None]
    s = torch.arange(k_bshd.shape[1], device=k_bshd.device)[None, :]
    visible_ts = s <= t
    return visible_ts if window is None else visible_ts & (s > t - window)


def visible_softmax(scores_bhts: Tensor, visible: Tensor) -> Tensor:
    """Compute the softmax over the visible keys. The weights of other keys are exactly zero.

    Args:
        scores_bhts: [b, hq, tq, tk].
        visible: bool, broadcast to the scores; at least one key per query.
    """
    return scores_bhts.masked_fill(~visible, -torch.inf).softmax(dim=-1)
