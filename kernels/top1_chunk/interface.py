"""The public form of Top-1 Chunk selection: checks, and the choice of an implementation."""

from typing import Literal, overload

from torch import Tensor

from kernels.dispatch import (
    Choice,
    check_attention,
    check_option,
    check_positive_int,
    choose,
    full_precision,
    resolve_scale,
)
from kernels.top1_chunk.reference import top1_chunk_reference

Score = Literal["approx", "exact", "exact_lse"]
Implementation = Literal["auto", "reference"]
_IMPLEMENTATIONS = {"reference": top1_chunk_reference}


@overload
def top1_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int = ...,
    top_k: int = ...,
    score: Score = ...,
    local: bool = ...,
    scale: float | None = ...,
    query_offset: int = ...,
    return_selection: Literal[False] = ...,
    implementation: Implementation = ...,
) -> Tensor: ...
@overload
def top1_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int = ...,
    top_k: int = ...,
    score: Score = ...,
    local: bool = ...,
    scale: float | None = ...,
    query_offset: int = ...,
    return_selection: Literal[True],
    implementation: Implementation = ...,
) -> tuple[Tensor, Tensor]: ...
def top1_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int = 128,
    top_k: int = 1,
    score: Score = "exact",
    local: bool = True,
    scale: float | None = None,
    query_offset: int = 0,
    return_selection: bool = False,
    implementation: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Top-1 Chunk selection: one softmax over the query's own chunk and the best top_k complete earlier chunks.

    A chunk's score for a query is q . mean of its keys ("approx"), the highest q.k ("exact"), or logsumexp of
    scale * q.k ("exact_lse"), all in fp32 from the unrounded inputs. The lowest chunk index wins a tie. A query with
    fewer than top_k earlier chunks takes them all; one in chunk 0 has its own chunk only, whatever `local` says. The
    choice is a constant for the gradient; q, k and v learn through the softmax.

    Args:
        q: queries [b, tq, hq, d]; fp32, bf16, fp16 or float64.
        k: keys [b, tk, hkv, d], hq a multiple of hkv; query head h uses key head h // (hq // hkv).
        v: values [b, tk, hkv, dv].
        chunk_size: keys per chunk; tk need not be a multiple.
        top_k: how many earlier chunks a query takes.
        score: how chunks are scored.
        local: whether the query also attends to its own chunk, up to itself.
        scale: positive factor on q.k; None means d**-0.5.
        query_offset: global position of the first query; keys are at 0 .. tk-1.
        return_selection: also return the chosen chunks.
        implementation: "reference", or "auto".

    Returns:
        o [b, tq, hq, dv] in v's dtype; with return_selection also the chosen chunk indices [b, tq, hq, top_k] int64,
        best first, -1 where there is none.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Lu et al. 2025 (arXiv 2505.18522); defaults of `score`, `local`, `top_k` are a reconstruction.
    """
    check_attention(q, k, v, query_offset)
    check_positive_int("chunk_size", chunk_size)
    check_positive_int("top_k", top_k)
    check_option("score", score, ("approx", "exact", "exact_lse"))
    automatic = Choice("reference", "the only one")
    chosen = choose("top1_chunk_attention", implementation, _IMPLEMENTATIONS, automatic)
    with full_precision(q):
        out, selection = _IMPLEMENTATIONS[chosen.name](
            q,
            k,
            v,
            chunk_size=chunk_size,
            top_k=top_k,
            score=score,
            local=local,
            scale=resolve_scale(scale, q.shape[3]),
            query_offset=query_offset,
        )
    return (out, selection) if return_selection else out
