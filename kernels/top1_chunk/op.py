"""Triton implementation of Top-1 Chunk attention as operators of torch.library, opaque to torch.compile.

Triton is imported only when an operator is called.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.common.documents import document_bounds, flat_tokens
from kernels.top1_chunk.chunks import Layout, chunk_table, first_slots


def _problem(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, chunk_size: int, local: bool, scale: float, query_offset: int
) -> Any:
    from kernels.top1_chunk.triton_problem import Problem

    layout, bounds = _layout_and_bounds(q, k, cu_seqlens, chunk_size, query_offset)
    table = chunk_table(layout, bounds, q.device)
    longest = layout.num_keys if bounds is None else max(end - start for start, end in pairwise(bounds))
    return Problem(table, layout, q.shape[2], k.shape[2], q.shape[3], q.dtype, scale, local, longest)


def _layout_and_bounds(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, chunk_size: int, query_offset: int
) -> tuple[Layout, list[int] | None]:
    layout = Layout(q.shape[0], q.shape[1], k.shape[1], query_offset, chunk_size)
    return layout, None if cu_seqlens is None else document_bounds(cu_seqlens, layout.batch, layout.num_keys)


@torch.library.custom_op("selectron::top1_chunk", mutates_args=())
def top1_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    selection: Tensor | None,
    chunk_size: int,
    top_k: int,
    score: str,
    local: bool,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `top1_chunk_attention`, which checks the arguments. All head dims must be equal.

    Returns:
        out: [b, tq, hq, d] in v's dtype.
        lse: fp32 [hkv, b * tq * R], log-sum-exp in units of log2, with R query heads per key head.
        chosen: int32 [top_k, hkv, b * tq * R], slots of the chunk table, -1 for a missing chunk.
    """
    from kernels.top1_chunk import triton_launch

    problem = _problem(q, k, cu_seqlens, chunk_size, local, scale, query_offset)
    flat = [flat_tokens(x) for x in (q, k, v)]
    selected_slots = None if selection is None else _to_slots(selection, q, k, chunk_size, query_offset)
    out, lse, chosen = triton_launch.forward(problem, *flat, top_k=top_k, score=score, selected_slots=selected_slots)
    return out.view(q.shape), lse, chosen


@top1_chunk.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    selection: Tensor | None,
    chunk_size: int,
    top_k: int,
    score: str,
    local: bool,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_queries, num_heads, _ = q.shape
    num_groups = k.shape[2]
    rows = batch * num_queries * (num_heads // num_groups)
    lse = q.new_empty(num_groups, rows, dtype=torch.float32)
    return v.new_empty(q.shape), lse, q.new_empty(top_k, num_groups, rows, dtype=torch.int32)


@torch.library.custom_op("selectron::top1_chunk_backward", mutates_args=())
def top1_chunk_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    local: bool,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the gradient of `out` and inputs and outputs of `top1_chunk`."""
    from kernels.top1_chunk import triton_launch

    problem = _problem(q, k, cu_seqlens, chunk_size, local, scale, query_offset)
    grad_nhd, q_nhd, k_nhd, v_nhd, out_nhd = (flat_tokens(x) for x in (grad, q, k, v, out))
    dq, dk, dv = triton_launch.backward(problem, grad_nhd, q_nhd, k_nhd, v_nhd, out_nhd, lse, chosen)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


@top1_chunk_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    local: bool,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, _, chunk_size, _, _, local, scale, query_offset = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.options = (chunk_size, local, scale, query_offset)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens = ctx.saved_tensors
    q, k, v, out, lse, chosen = tensors
    chunk_size, local, scale, query_offset = ctx.options
    gradients = top1_chunk_backward(grad, q, k, v, out, lse, chosen, cu_seqlens, chunk_size, local, scale, query_offset)
    return (*gradients, None, None, None, None, None, None, None, None)


top1_chunk.register_autograd(_backward, setup_context=_setup_context)


def relative_choice(
    chosen_mgr: Tensor, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, chunk_size: int, query_offset: int
) -> Tensor:
    """Convert the selected slots of `top1_chunk` to chunk indices within the row or document.

    Returns:
        int64 [b, tq, hq, top_k], -1 for a missing chunk.
    """
    layout, bounds = _layout_and_bounds(q, k, cu_seqlens, chunk_size, query_offset)
    return chunks_of_slots(chosen_mgr, chunk_table(layout, bounds, q.device), layout)


def chunks_of_slots(chosen_mgr: Tensor, table: Tensor, layout: Layout) -> Tensor:
    """Convert slots [top_k, hkv, rows] to chunk indices within the row or document, int64 [b, tq, hq, top_k]."""
    chosen_bthm, first_slot_n = to_query_layout(chosen_mgr, layout).long(), first_slots(table, layout)
    first_slot_bt = first_slot_n.view(layout.batch, layout.num_queries)
    return torch.where(chosen_bthm >= 0, chosen_bthm - first_slot_bt[..., None, None], -1)


def to_query_layout(x_mgr: Tensor, layout: Layout) -> Tensor:
    """Permute [top_k, hkv, b * tq * R] to [b, tq, hq, top_k]."""
    x_mgbtr = x_mgr.unflatten(2, (layout.batch, layout.num_queries, -1))
    return x_mgbtr.permute(2, 3, 1, 4, 0).flatten(2, 3)


def _to_slots(selection_bthm: Tensor, q: Tensor, k: Tensor, chunk_size: int, query_offset: int) -> Tensor:
    """Invert `relative_choice` for rows without packed documents: int32 [top_k, hkv, b * tq * R]."""
    layout, _ = _layout_and_bounds(q, k, None, chunk_size, query_offset)
    first_slot_n = first_slots(chunk_table(layout, None, q.device), layout)
    relative_mgnr = selection_bthm.flatten(0, 1).unflatten(1, (k.shape[2], -1)).permute(3, 1, 0, 2)
    chosen_mgnr = torch.where(relative_mgnr >= 0, relative_mgnr + first_slot_n[:, None], -1)
    return chosen_mgnr.to(torch.int32, memory_format=torch.contiguous_format).flatten(2)
