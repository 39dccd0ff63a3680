"""Causal softmax attention in plain torch: the definition, against which the faster implementations are tested."""

from torch import Tensor

from kernels.common.attention_math import causal_mask, mix_values, query_key_products, query_positions, visible_softmax


def attend(q_bthd: Tensor, k_bshd: Tensor, v_bshe: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax attention to the keys that a mask leaves visible.

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bshd: keys [b, tk, hkv, d].
        v_bshe: values [b, tk, hkv, dv].
        visible: bool, broadcast to [b, hq, tq, tk]; at least one key per query.
        scale: factor on q.k.

    Returns:
        [b, tq, hq, dv] in v's dtype.
    """
    scores_bhts = query_key_products(q_bthd, k_bshd) * scale
    return mix_values(visible_softmax(scores_bhts, visible), v_bshe)


def distance_bias(q_bthd: Tensor, k_bshd: Tensor, slopes_h: Tensor, query_offset: int) -> Tensor:
    """Return -slope * (t - s) for every head, query and key: [hq, tq, tk] in the slopes' dtype."""
    t = query_positions(q_bthd, query_offset)[:, None]
    s = query_positions(k_bshd, 0)[None, :]
    return -slopes_h[:, None, None] * (t - s)


def softmax_attention_reference(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshe: Tensor,
    *,
    scale: float,
    window: int | None,
    alibi_slopes: Tensor | None,
    query_offset: int,
) -> Tensor:
    """Compute attention over all [tq, tk] scores. Arguments as in `softmax_attention`, checked there."""
    visible_ts = causal_mask(q_bthd, k_bshd, query_offset, window)
    if alibi_slopes is None:
        return attend(q_bthd, k_bshd, v_bshe, visible_ts, scale)
    scores_bhts = query_key_products(q_bthd, k_bshd) * scale
    bias_hts = distance_bias(q_bthd, k_bshd, alibi_slopes.to(scores_bhts), query_offset)
    return mix_values(visible_softmax(scores_bhts + bias_hts, visible_ts), v_bshe)
