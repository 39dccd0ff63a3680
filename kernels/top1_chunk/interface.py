"""Public interface of Top-1 Chunk attention: argument checks and choice of an implementation."""

from typing import Any, Literal

import torch
from torch import Tensor

from kernels.common.dispatch import (
    check_attention,
    check_option,
    check_positive_int,
    check_shapes,
    choose_triton_or_reference,
    full_precision,
    resolve_scale,
    triton_attention_unsupported_reason,
)
from kernels.common.documents import by_document, document_bounds
from kernels.top1_chunk.op import relative_choice, top1_chunk
from kernels.top1_chunk.reference import top1_chunk_reference

Score = Literal["approx", "exact", "exact_lse"]
Implementation = Literal["auto", "reference", "triton"]

MAX_TOP_K = 16
TRITON_CHUNK_SIZES = (32, 64, 128, 256, 512)


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
) -> tuple[Tensor, Tensor | None]:
    """Top-1 Chunk attention: one softmax over the query's own chunk and its top_k best complete earlier chunks.

    A chunk's score for a query is q . mean of its keys ("approx"), the highest q.k ("exact"), or logsumexp of
    scale * q.k ("exact_lse"), all in fp32 from the unrounded inputs. The lowest chunk index wins a tie. A query with
    fewer than top_k earlier chunks selects all of them. A query in chunk 0 attends only to its own chunk, regardless of
    `local`. The selection has no gradient; q, k and v get gradients through the softmax.

    Args:
        q: queries [b, tq, hq, d]; fp32, bf16, fp16 or float64.
        k: keys [b, tk, hkv, d], hq a multiple of hkv; query head h uses key head h // (hq // hkv).
        v: values [b, tk, hkv, dv].
        chunk_size: keys per chunk, a power of two; tk need not be a multiple.
        top_k: number of earlier chunks per query, at most 16.
        score: score of a chunk, see above.
        local: True if a query also attends to its own chunk, up to its own position.
        scale: positive factor on q.k; None means d**-0.5.
        cu_seqlens: bounds of documents packed into one row (b = 1), int [documents + 1], see
            `kernels.common.documents`. Chunks start at a document's start, and attention stays within the document. On
            a GPU, `cu_seqlens` forces a device synchronisation; keep it on the CPU.
        query_offset: position of the first query in the row; keys are at 0 .. tk-1.
        selection: chunks to attend to instead of those with the best scores, int64 [b, tq, hq, top_k], in the format of
            `return_selection`: distinct, complete and earlier than the query's own, padded with -1 at the end. Not
            allowed with `cu_seqlens`.
        return_selection: True to return the selected chunks.
        implementation: "reference"; "triton", which never materialises [tq, tk]; or "auto" for Triton on a GPU where it
            is supported. Triton needs d = dv up to 256 and a chunk_size of 32 to 512, and rounds the mean key of
            "approx" to the inputs' dtype.

    Returns:
        o: output [b, tq, hq, dv] in v's dtype.
        selection: selected chunk indices [b, tq, hq, top_k] int64, counted within the row or document, best first, -1
            for a missing chunk, or None without `return_selection`.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Lu et al. 2025 (arXiv 2505.18522). The defaults of `score`, `local` and `top_k` are a reconstruction.
    """
    check_attention(q, k, v, query_offset)
    _check_options(chunk_size, top_k, score)
    _check_selection(selection, q, top_k, cu_seqlens)
    scale = resolve_scale(scale, q.shape[3] ** -0.5)
    unsupported_reason = chunk_unsupported_reason(q, v, chunk_size)
    if choose_triton_or_reference("top1_chunk_attention", implementation, q, unsupported_reason).name == "triton":
        out, _, slots = top1_chunk(q, k, v, cu_seqlens, selection, chunk_size, top_k, score, local, scale, query_offset)
        if not return_selection:
            return out, None
        return out, relative_choice(slots, q, k, cu_seqlens, chunk_size, query_offset)
    options: dict[str, Any] = {"chunk_size": chunk_size, "top_k": top_k, "score": score, "local": local, "scale": scale}
    with full_precision(q):
        if cu_seqlens is None:
            out, selection = top1_chunk_reference(q, k, v, query_offset=query_offset, selection=selection, **options)
        else:
            bounds = document_bounds(cu_seqlens, k.shape[0], k.shape[1])
            out, selection = by_document(top1_chunk_reference, q, k, v, bounds, query_offset=query_offset, **options)
    return out, selection if return_selection else None


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


def chunk_unsupported_reason(q: Tensor, v: Tensor, chunk_size: int) -> str | None:
    """Return the reason why the Triton implementation does not support these inputs, and the fix; None if it does."""
    if chunk_size not in TRITON_CHUNK_SIZES:
        return f"chunk_size is {chunk_size}: give one of {list(TRITON_CHUNK_SIZES)}"
    return triton_attention_unsupported_reason(q, v)
