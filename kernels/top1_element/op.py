"""Triton implementation of Top-1 Element attention as two operators of torch.library, opaque to torch.compile.

Triton is imported only when an operator is called.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.common.documents import document_bounds, flat_tokens
from kernels.top1_element.ranges import Shape, visible_ranges


def _problem(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, estimator: str, scale: float, query_offset: int) -> Any:
    from kernels.top1_element.triton_launch import Problem

    (batch, num_queries, num_heads, head_dim), (num_keys, num_groups) = q.shape, k.shape[1:3]
    shape = Shape(batch, num_queries, num_keys, query_offset)
    bounds = None if cu_seqlens is None else tuple(document_bounds(cu_seqlens, batch, num_keys))
    ranges = visible_ranges(shape, bounds, q.device)
    return Problem(ranges, shape, num_heads, num_groups, head_dim, q.dtype, scale, estimator)


@torch.library.custom_op("selectron::top1_element", mutates_args=())
def top1_element(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    estimator: str,
    training: bool,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `top1_element_attention`, which checks the arguments. All head dims must be equal.

    Without `training`, there is no gradient.

    Returns:
        out: [b, tq, hq, d] in v's dtype.
        soft: softmax-weighted values [b, tq, hq, d] in v's dtype; empty unless the gradient needs them.
        lse: fp32 [hq, b * tq], log-sum-exp in units of log2; empty unless training.
        chosen: int32 [hq, b * tq], flat key tokens.
    """
    from kernels.top1_element import triton_launch

    problem = _problem(q, k, cu_seqlens, estimator, scale, query_offset)
    out, soft, lse, chosen = triton_launch.forward(problem, flat_tokens(q), flat_tokens(k), flat_tokens(v), training)
    return out.view(q.shape), soft.view(q.shape) if soft.numel() else soft, lse, chosen


@top1_element.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    estimator: str,
    training: bool,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (q.shape[2], q.shape[0] * q.shape[1])
    mixes = training and estimator == "straight_through"
    return (
        v.new_empty(q.shape),
        v.new_empty(q.shape if mixes else 0),
        q.new_empty(rows if training else 0, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.int32),
    )


@torch.library.custom_op("selectron::top1_element_backward", mutates_args=())
def top1_element_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    lse: Tensor,
    chosen: Tensor,
    cu_seqlens: Tensor | None,
    estimator: str,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the gradient of `out`.

    `mixed` is `soft` of `top1_element`, or its `out` for the estimator "selected". The rest is as in `top1_element`.
    """
    from kernels.top1_element import triton_launch

    problem = _problem(q, k, cu_seqlens, estimator, scale, query_offset)
    flat = [flat_tokens(x) for x in (grad, q, k, v, mixed)]
    dq, dk, dv = triton_launch.backward(problem, lse, chosen, *flat)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


@top1_element_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    lse: Tensor,
    chosen: Tensor,
    cu_seqlens: Tensor | None,
    estimator: str,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, estimator, training, scale, query_offset = inputs
    out, soft, lse, chosen = output
    ctx.mark_non_differentiable(soft, lse, chosen)
    ctx.set_materialize_grads(False)  # allocate no zero gradients for these three
    if training:
        ctx.save_for_backward(q, k, v, soft if estimator == "straight_through" else out, lse, chosen, cu_seqlens)
    ctx.training = training
    ctx.options = (estimator, scale, query_offset)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    if not ctx.training:
        raise RuntimeError("training is False: the tensors for the backward pass were not saved")
    *tensors, cu_seqlens = ctx.saved_tensors
    gradients = top1_element_backward(grad, *tensors, cu_seqlens, *ctx.options)
    return (*gradients, None, None, None, None, None)


top1_element.register_autograd(_backward, setup_context=_setup_context)


def relative_choice(chosen_hn: Tensor, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Convert `chosen` of `top1_element` to positions in the row or document, int64 [b, tq, hq]."""
    key_bth = chosen_hn.T.long().unflatten(0, q.shape[:2])
    if cu_seqlens is None:
        return key_bth % k.shape[1]
    bound_d = cu_seqlens.to(q.device, torch.int64)
    return key_bth - bound_d[torch.searchsorted(bound_d, key_bth.contiguous(), right=True) - 1]
