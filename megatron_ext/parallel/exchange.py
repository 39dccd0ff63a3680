"""Differentiable exchanges over the context-parallel group.

Each rank holds a contiguous part of the sequence. Tensors are sequence-first, as Megatron's: [t, b, n, w], with n heads
(or query groups) of width w.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _all_to_all(parts_rx: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange parts: part r of the first dimension goes to rank r; what comes from rank r becomes part r."""
    parts_rx = parts_rx.contiguous()
    received_rx = torch.empty_like(parts_rx)
    dist.all_to_all_single(received_rx, parts_rx, group=group)
    return received_rx


def _sequence_to_heads(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    size = group.size()
    t, b, n, w = x_tbnw.shape
    parts = x_tbnw.view(t, b, size, n // size, w).permute(2, 0, 1, 3, 4)
    return _all_to_all(parts, group).reshape(size * t, b, n // size, w)


def _heads_to_sequence(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    size = group.size()
    t, b, n, w = x_tbnw.shape
    received = _all_to_all(x_tbnw.reshape(size, t // size, b, n, w), group)
    return received.permute(1, 2, 0, 3, 4).reshape(t // size, b, size * n, w)


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _sequence_to_heads(x_tbnw, group)

    @staticmethod
    def backward(ctx: Any, grad_tbnw: Tensor) -> tuple[Tensor, None]:
        return _heads_to_sequence(grad_tbnw, ctx.group), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _heads_to_sequence(x_tbnw, group)

    @staticmethod
    def backward(ctx: Any, grad_tbnw: Tensor) -> tuple[Tensor, None]:
        return _sequence_to_heads(grad_tbnw, ctx.group), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x_tbnw.new_empty(group.size() * x_tbnw.shape[0], *x_tbnw.shape[1:])
        dist.all_gather_into_tensor(whole, x_tbnw.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad_tbnw: Tensor) -> tuple[Tensor, None]:
        part = grad_tbnw.new_empty(grad_tbnw.shape[0] // ctx.group.size(), *grad_tbnw.shape[1:])
        dist.reduce_scatter_tensor(part, grad_tbnw.contiguous(), group=ctx.group)
        return part, None


def sequence_to_heads(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """From a part of the sequence of all heads to the whole sequence of a part of the heads (all-to-all).

    Args:
        x_tbnw: [t/cp, b, n, w]; n must divide by the group's size.
        group: context-parallel group; rank r gets heads [r*n/cp, (r+1)*n/cp).

    Returns:
        [t, b, n/cp, w]. The gradient takes the way back.
    """
    return _SequenceToHeads.apply(x_tbnw, group)


def heads_to_sequence(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of `sequence_to_heads`: [t, b, n/cp, w] to [t/cp, b, n, w]."""
    return _HeadsToSequence.apply(x_tbnw, group)


def gather_sequence(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """All parts of the sequence, in order: [t/cp, b, n, w] to [t, b, n, w]; gradients are summed back to their part."""
    return _GatherSequence.apply(x_tbnw, group)
