"""Functions of flash-attn that flash-linear-attention's layers call, in plain torch over all pairs.

Suffixes: t query, s key, h head, d width. Packed sequences are concatenated along t and s.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_attn_func(q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, *, causal: bool, window_size: Any) -> Tensor:
    """Causal attention to at most `window_size[0]` keys before the query's own, or to all for -1."""
    assert causal
    before, distance = window_size[0], torch.arange(q_bthd.shape[1])[:, None] - torch.arange(k_bshd.shape[1])
    seen_ts = (distance >= 0) & ((distance <= before) | (before == -1))
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bshd, v_bshd))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_ts, enable_gqa=True).transpose(1, 2)


def _scores(q_thd: Tensor, k_shd: Tensor, **options: Any) -> Tensor:
    """Scores [h, t, s], with minus infinity between sequences and, if causal, for later keys."""
    t, s = torch.arange(len(q_thd)), torch.arange(len(k_shd))
    sequence_t = torch.searchsorted(options["cu_seqlens_q"].long(), t, right=True)
    sequence_s = torch.searchsorted(options["cu_seqlens_k"].long(), s, right=True)
    seen_ts = sequence_t[:, None] == sequence_s
    if options["causal"]:
        seen_ts = seen_ts & (t[:, None] >= s)
    scores_hts = torch.einsum("thd,shd->hts", q_thd, k_shd) * options["softmax_scale"]
    return scores_hts.masked_fill(~seen_ts, -torch.inf)


def varlen_forward(*, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> tuple[Any, ...]:
    """Return the outputs [t, h, d] and the log-sum-exp [h, t]."""
    assert dropout_p == 0.0
    scores_hts = _scores(q, k, **options)
    return torch.einsum("hts,shd->thd", scores_hts.softmax(-1), v), scores_hts.logsumexp(-1), None, None


def varlen_backward(
    *, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, **options: Any
) -> None:
    """Fill dq, dk and dv. The keys may be a subset of those that `softmax_lse` and the outputs cover."""
    weights_hts = (_scores(q, k, **options) - softmax_lse[..., None]).exp()
    of_weights_hts = torch.einsum("thd,shd->hts", dout, v) - (dout * out).sum(-1).T[..., None]
    of_scores_hts = weights_hts * of_weights_hts * options["softmax_scale"]
    options["dq"].copy_(torch.einsum("hts,shd->thd", of_scores_hts, k))
    options["dk"].copy_(torch.einsum("hts,thd->shd", of_scores_hts, q))
    options["dv"].copy_(torch.einsum("hts,thd->shd", weights_hts, dout))
