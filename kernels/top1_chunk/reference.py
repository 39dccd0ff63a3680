"""Top-1 Chunk attention in plain torch, in two steps: select chunks, and attend to them.

Chunk c is the keys c * chunk_size .. (c + 1) * chunk_size - 1. Suffixes as in attention_math; n chunk, m rank of a
selected chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.attention_math import causal_mask, query_key_products, query_positions, upcast
from kernels.softmax_attention.reference import attend


def chunk_scores(q_bthd: Tensor, k_bshd: Tensor, *, chunk_size: int, score: str, scale: float) -> Tensor:
    """Score every complete chunk for every query, including those that the query may not select.

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bshd: keys [b, tk, hkv, d].
        chunk_size: keys per chunk.
        score: "approx": q . mean of the keys; "exact": the highest q.k; "exact_lse": logsumexp of scale * q.k.
        scale: factor on q.k; only "exact_lse" depends on it.

    Returns:
        [b, hq, tq, tk // chunk_size], fp32 or float64.
    """
    num_complete = k_bshd.shape[1] // chunk_size
    if score == "approx":
        return query_key_products(q_bthd, mean_keys(k_bshd, chunk_size))
    k_bncgd = k_bshd[:, : num_complete * chunk_size].unflatten(1, (num_complete, chunk_size))
    products_bhtnc = query_key_products(q_bthd, k_bncgd.flatten(1, 2)).unflatten(-1, (num_complete, chunk_size))
    if score == "exact":
        return products_bhtnc.amax(dim=-1)
    return (products_bhtnc * scale).logsumexp(dim=-1)


def mean_keys(k_bshd: Tensor, chunk_size: int) -> Tensor:
    """Return the mean key of every complete chunk: [b, tk // chunk_size, hkv, d], fp32 or float64."""
    num_complete = k_bshd.shape[1] // chunk_size
    return upcast(k_bshd[:, : num_complete * chunk_size].unflatten(1, (num_complete, chunk_size))).mean(dim=2)


@torch.no_grad()
def select_chunks(
    q_bthd: Tensor, k_bshd: Tensor, *, chunk_size: int, top_k: int, score: str, scale: float, query_offset: int
) -> Tensor:
    """Select for every query the top_k best chunks before its own; the lowest index wins a tie.

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bshd: keys [b, tk, hkv, d].
        chunk_size: keys per chunk.
        top_k: number of chunks.
        score: as in `chunk_scores`.
        scale: as in `chunk_scores`.
        query_offset: global position of the first query.

    Returns:
        int64 [b, tq, hq, top_k], best first, -1 for a missing chunk. No gradient.
    """
    scores_bhtn = chunk_scores(q_bthd, k_bshd, chunk_size=chunk_size, score=score, scale=scale)
    # The number of earlier chunks is the query's own chunk index; all of them are complete.
    return best_chunks(scores_bhtn, query_positions(q_bthd, query_offset) // chunk_size, top_k)[1]


def best_chunks(scores_bhtn: Tensor, num_earlier_t: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Select every query's best chunks among a number of leading chunks; the lowest index wins a tie.

    Args:
        scores_bhtn: scores from `chunk_scores`.
        num_earlier_t: int64 [tq], number of leading chunks that a query may select from.
        top_k: number of chunks to select.

    Returns:
        Scores and int64 indices of the selected chunks, [b, tq, hq, top_k], best first; -inf and -1 if missing.
    """
    num_chunks, device = scores_bhtn.shape[-1], scores_bhtn.device
    earlier_tn = torch.arange(num_chunks, device=device) < num_earlier_t[:, None]
    # A stable sort, because topk guarantees no order among equal scores.
    best = scores_bhtn.masked_fill(~earlier_tn, -torch.inf).sort(dim=-1, descending=True, stable=True)
    exists_tm = torch.arange(min(top_k, num_chunks), device=device) < num_earlier_t[:, None]
    chosen_bhtm = best.indices[..., :top_k].masked_fill(~exists_tm, -1)
    missing = (0, top_k - chosen_bhtm.shape[-1])
    scores_bhtm = F.pad(best.values[..., :top_k], missing, value=-torch.inf)
    return scores_bhtm.transpose(1, 2), F.pad(chosen_bhtm, missing, value=-1).transpose(1, 2)


def selection_mask(
    chosen_bthm: Tensor, q_bthd: Tensor, k_bshd: Tensor, *, chunk_size: int, local: bool, query_offset: int
) -> Tensor:
    """Return the mask of the keys that a query attends to: its selected chunks and its own chunk up to its position.

    Args:
        chosen_bthm: int64 [b, tq, hq, top_k] from `select_chunks`.
        q_bthd: queries, for tq.
        k_bshd: keys, for tk.
        chunk_size: keys per chunk.
        local: True to include the query's own chunk. For queries in chunk 0 it is always included.
        query_offset: global position of the first query.

    Returns:
        bool [b, hq, tq, tk].
    """
    s = query_positions(k_bshd, 0)
    chunk_s = s // chunk_size
    num_chunks = int(k_bshd.shape[1] - 1) // chunk_size + 1
    chosen_bhtm = chosen_bthm.transpose(1, 2)
    # One extra column receives the entries of -1.
    taken_bhtn = torch.zeros(*chosen_bhtm.shape[:3], num_chunks + 1, dtype=torch.bool, device=s.device)
    taken_bhtn.scatter_(-1, chosen_bhtm.where(chosen_bhtm >= 0, num_chunks), True)
    own_t1 = (query_positions(q_bthd, query_offset) // chunk_size)[:, None]
    own_ts = causal_mask(q_bthd, k_bshd, query_offset) & (chunk_s == own_t1)
    if not local:
        own_ts = own_ts & (own_t1 == 0)
    return taken_bhtn[..., chunk_s] | own_ts


def top1_chunk_reference(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshe: Tensor,
    *,
    chunk_size: int,
    top_k: int,
    score: str,
    local: bool,
    scale: float,
    query_offset: int,
    selection: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the op over all [tq, tk] scores. Arguments as in `top1_chunk_attention`, checked there.

    Returns:
        o [b, tq, hq, dv] in v's dtype and the selected chunks, int64 [b, tq, hq, top_k].
    """
    chosen_bthm = selection
    if chosen_bthm is None:
        chosen_bthm = select_chunks(
            q_bthd, k_bshd, chunk_size=chunk_size, top_k=top_k, score=score, scale=scale, query_offset=query_offset
        )
    visible_bhts = selection_mask(
        chosen_bthm, q_bthd, k_bshd, chunk_size=chunk_size, local=local, query_offset=query_offset
    )
    return attend(q_bthd, k_bshd, v_bshe, visible_bhts, scale), chosen_bthm
