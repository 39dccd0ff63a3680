"""Top-1 Element attention in plain torch: each query takes the value of its best key."""

import torch
from torch import Tensor

from kernels.common.attention_math import causal_mask, mix_values, query_key_products, visible_softmax


def select_elements(products_bhts: Tensor, visible_ts: Tensor) -> Tensor:
    """Find each query's visible key with the highest product; the lowest index wins a tie.

    Args:
        products_bhts: q_t.k_s, [b, hq, tq, tk]. Unscaled, because scaling could round two different products to one.
        visible_ts: bool [tq, tk].

    Returns:
        int64 [b, hq, tq].
    """
    # argmax returns the first of equal maxima.
    return products_bhts.detach().masked_fill(~visible_ts, -torch.inf).argmax(dim=-1)


def straight_through_weights(p_bhts: Tensor, best_bht: Tensor) -> Tensor:
    """Return onehot(best) + p - stop(p): exactly onehot in value, with p's gradient."""
    onehot_bhts = torch.zeros_like(p_bhts).scatter_(-1, best_bht[..., None], 1.0)
    # Keep this order: p - stop(p) is exactly zero, but (onehot + p) - stop(p) is not exactly onehot.
    return onehot_bhts + (p_bhts - p_bhts.detach())


def selected_weights(scores_bhts: Tensor, visible_ts: Tensor, best_bht: Tensor) -> Tensor:
    """Return onehot(best) * p / stop(p): exactly onehot in value, with the gradient of log p at the best key."""
    log_p_bhts = scores_bhts.masked_fill(~visible_ts, -torch.inf).log_softmax(dim=-1)
    log_p_bht1 = log_p_bhts.gather(-1, best_bht[..., None])
    ratio_bht1 = (log_p_bht1 - log_p_bht1.detach()).exp()
    return torch.zeros_like(scores_bhts).scatter(-1, best_bht[..., None], ratio_bht1)


def top1_element_reference(
    q_bthd: Tensor, k_bshd: Tensor, v_bshe: Tensor, *, estimator: str, scale: float, query_offset: int
) -> tuple[Tensor, Tensor]:
    """Compute the op over all [tq, tk] scores. Arguments as in `top1_element_attention`, checked there.

    Returns:
        o [b, tq, hq, dv] in v's dtype and j* [b, tq, hq] int64.
    """
    visible_ts = causal_mask(q_bthd, k_bshd, query_offset)
    products_bhts = query_key_products(q_bthd, k_bshd)
    best_bht = select_elements(products_bhts, visible_ts)
    scores_bhts = products_bhts * scale
    if estimator == "straight_through":
        weights_bhts = straight_through_weights(visible_softmax(scores_bhts, visible_ts), best_bht)
    else:
        weights_bhts = selected_weights(scores_bhts, visible_ts, best_bht)
    # The weights are a single 1 and zeros, so this sum is exactly v_j*.
    return mix_values(weights_bhts, v_bshe), best_bht.transpose(1, 2)
