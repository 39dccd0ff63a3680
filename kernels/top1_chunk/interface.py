"""The public form of Top-1 Chunk selection: checks, and the choice of an implementation."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from kernels.dispatch import (
    check_attention,
    check_option,
    check_positive_int,
    check_shapes,
    choose_triton_or_reference,
    full_precision,
    resolve_scale,
    triton_attention_obstacle,
)
from kernels.documents import by_document, document_bounds
from kernels.top1_chunk.op import relative_choice, top1_chunk
from kernels.top1_chunk.reference import top1_chunk_reference

Score = Literal["approx", "exact", "exact_lse"]
Implementation = Literal["auto", "reference", "triton"]

MAX_TOP_K = 16
TRITON_CHUNK_SIZES = (32, 64, 128, 256, 512)


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
    cu_seqlens: Tensor | None = ...,
    query_offset: int = ...,
    selection: Tensor | None = ...,
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
    cu_seqlens: Tensor | None = ...,
    query_offset: int = ...,
    selection: Tensor | None = ...,
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
    cu_seqlens: Tensor | None = None,
    query_offset: int = 0,
    selection: Tensor | None = None,
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
        chunk_size: keys per chunk, a power of two; tk need not be a multiple.
        top_k: how many earlier chunks a query takes, at most 16.
        score: how chunks are scored.
        local: whether the query also attends to its own chunk, up to itself.
        scale: factor on q.k, not negative; None means d**-0.5.
        cu_seqlens: bounds of documents packed into one row (b = 1), int [documents + 1], see `documents`: chunks start
            at a document's start, and nothing outside it is seen. On a GPU it is waited for; leave it on the CPU.
        query_offset: position of the first query in the row; keys are at 0 .. tk-1.
        selection: the chunks that each query takes, int64 [b, tq, hq, top_k], which are then not chosen by `score`:
            as `return_selection` gives them, distinct, complete and earlier than the query's own, -1 behind them where
            there are fewer. Not with `cu_seqlens`.
        return_selection: also return the chosen chunks.
        implementation: "reference"; "triton", which never holds [tq, tk] and wants d = dv up to 256, chunks of 32 to
            512 keys, and rounds the mean key of "approx" to the inputs' dtype; or "auto", triton where it can.

    Returns:
        o [b, tq, hq, dv] in v's dtype; with return_selection also the chosen chunk indices [b, tq, hq, top_k] int64,
        counted in the row or document, best first, -1 where there is none.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Lu et al. 2025 (arXiv 2505.18522); defaults of `score`, `local`, `top_k` are a reconstruction.
    """
    check_attention(q, k, v, query_offset)
    _check_options(chunk_size, top_k, score)
    _check_selection(selection, q, top_k, cu_seqlens)
    scale = resolve_scale(scale, q.shape[3])
    obstacle = form_obstacle(q, v, chunk_size)
    if choose_triton_or_reference("top1_chunk_attention", implementation, q, obstacle).name == "triton":
        out, _, slots = top1_chunk(q, k, v, cu_seqlens, selection, chunk_size, top_k, score, local, scale, query_offset)
        if not return_selection:
            return out
        return out, relative_choice(slots, q, k, cu_seqlens, chunk_size, query_offset)
    options: dict[str, Any] = {"chunk_size": chunk_size, "top_k": top_k, "score": score, "local": local, "scale": scale}
    with full_precision(q):
        if cu_seqlens is None:
            out, selection = top1_chunk_reference(q, k, v, query_offset=query_offset, selection=selection, **options)
        else:
            bounds = document_bounds(cu_seqlens, k.shape[0], k.shape[1])
            out, selection = by_document(top1_chunk_reference, q, k, v, bounds, query_offset=query_offset, **options)
    return (out, selection) if return_selection else out


def _check_options(chunk_size: int, top_k: int, score: str) -> None:
    check_positive_int("chunk_size", chunk_size)
    if chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}: give a power of two")
    check_positive_int("top_k", top_k)
    if top_k > MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}: give at most {MAX_TOP_K}")
    check_option("score", score, ("approx", "exact", "exact_lse"))


def _check_selection(selection: Tensor | None, q: Tensor, top_k: int, cu_seqlens: Tensor | None) -> None:
    if selection is None:
        return
    if cu_seqlens is not None:
        raise ValueError("selection is given with cu_seqlens: give one of them")
    if selection.dtype != torch.int64:
        raise ValueError(f"selection has dtype {selection.dtype}: give torch.int64")
    check_shapes(q, {"selection": (selection, [*q.shape[:3], top_k])})


def form_obstacle(q: Tensor, v: Tensor, chunk_size: int) -> str | None:
    """Say why the Triton form cannot take these inputs, with the mend; None when it can."""
    if chunk_size not in TRITON_CHUNK_SIZES:
        return f"chunk_size is {chunk_size}: give one of {list(TRITON_CHUNK_SIZES)}"
    return triton_attention_obstacle(q, v)
