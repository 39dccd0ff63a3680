"""Separate chunk selection for Top-1 Chunk attention with sharded keys: by mean keys, or by the keys of one shard.

The selected chunks are passed to `top1_chunk_attention` as its `selection`. The functions have no gradient. Each uses
the implementation, Triton or plain torch, that `top1_chunk_attention` uses for the same inputs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.attention_math import query_key_products, query_positions
from kernels.common.dispatch import choose_triton_or_reference, full_precision, resolve_scale
from kernels.common.documents import flat_tokens
from kernels.top1_chunk import reference
from kernels.top1_chunk.chunks import Layout, local_chunk_table
from kernels.top1_chunk.interface import Implementation, Score, chunk_unsupported_reason
from kernels.top1_chunk.op import chunks_of_slots, to_query_layout


class Best(NamedTuple):
    """Best chunks of each query, best first.

    Attributes:
        scores: [b, tq, hq, top_k], -inf for a missing chunk. Comparable only for the same implementation and `score`.
        chunks: int64 [b, tq, hq, top_k], indices in the whole sequence, -1 for a missing chunk.
    """

    scores: Tensor
    chunks: Tensor


@torch.no_grad()
def mean_keys(k: Tensor, chunk_size: int, *, implementation: Implementation = "auto") -> Tensor:
    """Compute the mean key of every chunk.

    Args:
        k: keys [b, tk, hkv, d], complete chunks.
        chunk_size: keys per chunk.
        implementation: "reference", "triton" or "auto".

    Returns:
        [b, tk // chunk_size, hkv, d]; fp32 or float64 from the reference, k's dtype from Triton.
    """
    if _uses_triton("mean_keys", implementation, k, chunk_size):
        from kernels.top1_chunk import triton_launch_choice

        problem = _problem(k, k.shape[2], k.shape[1], chunk_size, 0)
        return triton_launch_choice.mean_keys(problem, flat_tokens(k)).unflatten(0, (len(k), -1))
    return reference.mean_keys(k, chunk_size)


@torch.no_grad()
def best_by_mean(
    q: Tensor,
    means: Tensor,
    *,
    chunk_size: int,
    top_k: int,
    query_offset: int = 0,
    implementation: Implementation = "auto",
) -> Tensor:
    """Select for every query the top_k earlier chunks with the best mean keys (score "approx").

    Args:
        q: queries [b, tq, hq, d].
        means: mean keys of the whole sequence from `mean_keys`, [b, chunks, hkv, d].
        chunk_size: keys per chunk.
        top_k: number of chunks.
        query_offset: position of the first query in the sequence.
        implementation: "reference", "triton" or "auto".

    Returns:
        int64 [b, tq, hq, top_k], best first, the lowest index first among equals, -1 for a missing chunk.
    """
    if _uses_triton("best_by_mean", implementation, q, chunk_size):
        from kernels.top1_chunk import triton_launch_choice

        problem = _problem(q, means.shape[2], means.shape[1] * chunk_size, chunk_size, query_offset)
        chosen = _empty_choice(problem, top_k)
        triton_launch_choice.select_by_mean(problem, flat_tokens(q), flat_tokens(means), chosen)
        return chunks_of_slots(chosen, problem.table, problem.layout)
    with full_precision(q):
        scores = query_key_products(q, means)
    return reference.best_chunks(scores, query_positions(q, query_offset) // chunk_size, top_k)[1]


@torch.no_grad()
def best_by_keys(
    q: Tensor,
    k: Tensor,
    *,
    chunk_size: int,
    top_k: int,
    score: Score,
    scale: float | None = None,
    query_offset: int = 0,
    first_chunk: int = 0,
    implementation: Implementation = "auto",
) -> Best:
    """Find for every query the top_k best earlier chunks among consecutive chunks of the sequence.

    Args:
        q: queries [b, tq, hq, d].
        k: keys [b, tk, hkv, d], consecutive complete chunks.
        chunk_size: keys per chunk.
        top_k: number of chunks.
        score: "exact" or "exact_lse"; see `top1_chunk_attention`.
        scale: factor on q.k for "exact_lse"; None means d**-0.5.
        query_offset: position of the first query in the sequence: a multiple of chunk_size, not before the first key.
        first_chunk: index of the first chunk of k in the sequence.
        implementation: "reference"; "triton", which scores every key without screening; or "auto".

    Returns:
        Scores and indices of the best chunks. The lowest index wins a tie.
    """
    scale = resolve_scale(scale, q.shape[3] ** -0.5)
    # Offset relative to the given keys.
    offset = query_offset - first_chunk * chunk_size
    if _uses_triton("best_by_keys", implementation, q, chunk_size):
        from kernels.top1_chunk import triton_launch_choice

        problem = _problem(q, k.shape[2], k.shape[1], chunk_size, min(offset, k.shape[1]), scale)
        chosen = _empty_choice(problem, top_k)
        scores = torch.empty_like(chosen, dtype=torch.float32)
        limit = k.shape[1] // chunk_size
        options: dict[str, Any] = {"lse": score == "exact_lse", "limit": limit, "scores": scores}
        triton_launch_choice.select_by_keys(problem, flat_tokens(q), flat_tokens(k), chosen, **options)
        best = Best(to_query_layout(scores, problem.layout), chunks_of_slots(chosen, problem.table, problem.layout))
    else:
        with full_precision(q):
            scores_bhtn = reference.chunk_scores(q, k, chunk_size=chunk_size, score=score, scale=scale)
        best = Best(*reference.best_chunks(scores_bhtn, query_positions(q, offset) // chunk_size, top_k))
    return best._replace(chunks=torch.where(best.chunks >= 0, best.chunks + first_chunk, -1))


def merge(a: Best, b: Best) -> Best:
    """Merge two results into the best chunks of both, independent of their order. The lowest index wins a tie."""
    top_k = a.chunks.shape[-1]
    scores, chunks = torch.cat([a.scores, b.scores], -1), torch.cat([a.chunks, b.chunks], -1)
    # Sort by index, then stably by score, so that equal scores stay in index order. Missing chunks come last.
    order = chunks.where(chunks >= 0, torch.iinfo(chunks.dtype).max).argsort(dim=-1)
    scores, chunks = scores.gather(-1, order), chunks.gather(-1, order)
    best = scores.sort(dim=-1, descending=True, stable=True)
    return Best(best.values[..., :top_k], chunks.gather(-1, best.indices[..., :top_k]))


def _uses_triton(op: str, implementation: str, q: Tensor, chunk_size: int) -> bool:
    return (
        choose_triton_or_reference(op, implementation, q, chunk_unsupported_reason(q, q, chunk_size)).name == "triton"
    )


def _problem(
    q: Tensor, num_groups: int, num_local_keys: int, chunk_size: int, query_offset: int, scale: float = 1.0
) -> Any:
    """Build the problem of queries over each sample's first `num_local_keys` keys, which may end before the queries."""
    from kernels.top1_chunk.triton_problem import Problem

    batch, num_queries, num_heads, head_dim = q.shape
    num_keys = max(num_local_keys, query_offset + num_queries)
    layout = Layout(batch, num_queries, num_keys, query_offset, chunk_size)
    table = local_chunk_table(layout, num_local_keys, q.device)
    return Problem(table, layout, num_heads, num_groups, head_dim, q.dtype, scale, True, num_keys)


def _empty_choice(problem: Any, top_k: int) -> Tensor:
    return torch.empty(top_k, problem.num_groups, problem.rows, dtype=torch.int32, device=problem.table.device)
