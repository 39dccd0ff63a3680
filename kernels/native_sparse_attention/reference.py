"""Native Sparse Attention in plain torch: the three branches and the block selection.

Block c is the keys c * block_size .. (c + 1) * block_size - 1; the last one may be incomplete. Suffixes as in
attention_math; n block, x branch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.attention_math import (
    causal_mask,
    mix_values,
    query_key_products,
    query_positions,
    upcast,
    visible_softmax,
)
from kernels.softmax_attention.reference import attend


def block_means(x_bshd: Tensor, block_size: int) -> Tensor:
    """Return the mean of every complete block: [b, s // block_size, h, d], fp32 or float64."""
    num_whole = x_bshd.shape[1] // block_size
    return upcast(x_bshd[:, : num_whole * block_size]).unflatten(1, (num_whole, block_size)).mean(dim=2)


def compressed_probabilities(
    q_bthd: Tensor, k_bnhd: Tensor, *, block_size: int, scale: float, query_offset: int
) -> Tensor:
    """Softmax over the mean keys of the complete blocks that end at or before the query.

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bnhd: mean keys [b, tk // block_size, hkv, d].
        block_size: keys per block.
        scale: factor on q.k.
        query_offset: global position of the first query.

    Returns:
        [b, hq, tq, tk // block_size], fp32 or float64; all 0 for a query that has no such block.
    """
    scores_bhtn = query_key_products(q_bthd, k_bnhd) * scale
    num_ended_t1 = ((query_positions(q_bthd, query_offset) + 1) // block_size)[:, None]
    ended_tn = torch.arange(k_bnhd.shape[1], device=q_bthd.device) < num_ended_t1
    # A softmax over no key is NaN. A query without such a block keeps all scores, and its result is set to 0.
    return visible_softmax(scores_bhtn, ended_tn | (num_ended_t1 == 0)).masked_fill(~ended_tn, 0.0)


@torch.no_grad()
def select_blocks(
    probabilities_bhtn: Tensor,
    q_bthd: Tensor,
    k_bshd: Tensor,
    *,
    block_size: int,
    num_selected: int,
    query_offset: int,
) -> Tensor:
    """Choose the blocks of every query: its own, the one before, block 0, and the most important other ones.

    The lowest index wins a tie.

    Args:
        probabilities_bhtn: as from `compressed_probabilities`; their sum over a group's heads is the importance.
        q_bthd: queries, for tq.
        k_bshd: keys [b, tk, hkv, d], for tk and hkv.
        block_size: keys per block.
        num_selected: number of blocks; less than 3 is taken as 3.
        query_offset: global position of the first query.

    Returns:
        bool [b, hkv, tq, blocks], including an incomplete last block. No gradient.
    """
    own_t1 = (query_positions(q_bthd, query_offset) // block_size)[:, None]
    n = torch.arange((k_bshd.shape[1] - 1) // block_size + 1, device=q_bthd.device)
    importance_bgtn = probabilities_bhtn.unflatten(1, (k_bshd.shape[2], -1)).sum(dim=2)
    # An incomplete last block has no probability. Only queries inside it may select it.
    importance_bgtn = F.pad(importance_bgtn, (0, len(n) - importance_bgtn.shape[-1]))
    is_fixed_tn = (n == own_t1) | (n == own_t1 - 1) | (n == 0)
    importance_bgtn = importance_bgtn.masked_fill(is_fixed_tn, torch.inf)
    importance_bgtn = importance_bgtn.masked_fill(n > own_t1, -torch.inf)
    # A stable sort, because topk guarantees no order among equal numbers.
    order_bgtn = importance_bgtn.sort(dim=-1, descending=True, stable=True).indices
    taken_bgtn = torch.zeros_like(importance_bgtn, dtype=torch.bool)
    return taken_bgtn.scatter_(-1, order_bgtn[..., : max(num_selected, 3)], True) & (n <= own_t1)


def native_sparse_attention_reference(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshe: Tensor,
    gates_bthx: Tensor,
    *,
    block_size: int,
    num_selected: int,
    window: int,
    scale: float,
    query_offset: int,
) -> Tensor:
    """Compute the op over all [tq, tk] scores. Arguments as in `native_sparse_attention`, checked there."""
    v_full_bshe = upcast(v_bshe)  # sum the branches before rounding
    probabilities_bhtn = compressed_probabilities(
        q_bthd, block_means(k_bshd, block_size), block_size=block_size, scale=scale, query_offset=query_offset
    )
    selected_bgtn = select_blocks(
        probabilities_bhtn,
        q_bthd,
        k_bshd,
        block_size=block_size,
        num_selected=num_selected,
        query_offset=query_offset,
    )
    block_s = query_positions(k_bshd, 0) // block_size
    selected_bgts = selected_bgtn[..., block_s] & causal_mask(q_bthd, k_bshd, query_offset)
    selected_bhts = selected_bgts.repeat_interleave(q_bthd.shape[2] // k_bshd.shape[2], dim=1)
    window_ts = causal_mask(q_bthd, k_bshd, query_offset, window)
    compressed = mix_values(probabilities_bhtn, block_means(v_bshe, block_size))
    selected = attend(q_bthd, k_bshd, v_full_bshe, selected_bhts, scale)
    windowed = attend(q_bthd, k_bshd, v_full_bshe, window_ts, scale)
    compressed_gates, selected_gates, window_gates = gates_bthx.to(v_full_bshe).split(1, dim=-1)
    return (compressed_gates * compressed + selected_gates * selected + window_gates * windowed).to(v_bshe.dtype)
