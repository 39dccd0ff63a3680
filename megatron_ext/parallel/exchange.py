"""Differentiable collectives over the ranks of a group.

In collectives over the sequence, each rank has a contiguous shard of the sequence. Tensors are sequence-first, as in
Megatron: [t, b, n, w], with n heads (or query groups) of width w.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

SequenceCollective = Callable[[Tensor, ProcessGroup], Tensor]


def all_to_all(
    rows_nx: Tensor, group: ProcessGroup, send_counts: list[int] | None = None, receive_counts: list[int] | None = None
) -> Tensor:
    """Send rows to each rank and receive rows from each rank; not differentiable.

    Args:
        rows_nx: rows [n, ...] to send, in the order of the receiving ranks.
        group: ranks that take part.
        send_counts: number of rows for each rank; None: equally many.
        receive_counts: number of rows from each rank; None: equally many.

    Returns:
        The received rows [n', ...], in the order of the sending ranks.
    """
    rows_nx = rows_nx.contiguous()
    received_nx = rows_nx.new_empty(len(rows_nx) if receive_counts is None else sum(receive_counts), *rows_nx.shape[1:])
    dist.all_to_all_single(received_nx, rows_nx, receive_counts, send_counts, group=group)
    return received_nx


def _gather_sequence(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    full_sequence = x_tbnw.new_empty(group.size() * x_tbnw.shape[0], *x_tbnw.shape[1:])
    dist.all_gather_into_tensor(full_sequence, x_tbnw.contiguous(), group=group)
    return full_sequence


def _reduce_scatter_sequence(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    shard = x_tbnw.new_empty(x_tbnw.shape[0] // group.size(), *x_tbnw.shape[1:])
    dist.reduce_scatter_tensor(shard, x_tbnw.contiguous(), group=group)
    return shard


class _Exchange(torch.autograd.Function):
    """Collective with its transpose in the backward pass; see `exchange`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_tbnw: Tensor,
        forward_collective: SequenceCollective,
        backward_collective: SequenceCollective,
        group: ProcessGroup,
    ) -> Tensor:
        ctx.backward_collective, ctx.group = backward_collective, group
        return forward_collective(x_tbnw, group)

    @staticmethod
    def backward(ctx: Any, grad_tbnw: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_collective(grad_tbnw, ctx.group), None, None, None


def exchange(
    x_tbnw: Tensor, forward_collective: SequenceCollective, backward_collective: SequenceCollective, group: ProcessGroup
) -> Tensor:
    """Move rows between ranks; the backward pass applies the transpose.

    Args:
        x_tbnw: rows of this rank.
        forward_collective: collective of the forward pass.
        backward_collective: collective of the backward pass, the transpose of `forward_collective`.
        group: ranks that take part.
    """
    exchanged: Tensor = _Exchange.apply(x_tbnw, forward_collective, backward_collective, group)
    return exchanged


def gather_sequence(x_tbnw: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather the sequence: [t/cp, b, n, w] to [t, b, n, w]; the backward pass reduce-scatters the gradient."""
    return x_tbnw if group.size() == 1 else exchange(x_tbnw, _gather_sequence, _reduce_scatter_sequence, group)


class _AllReduce(torch.autograd.Function):
    """All-reduce in both passes. Each rank uses the total for other channels, so that gradients must be summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _AllReduceGradient(torch.autograd.Function):
    """Identity in the forward pass, all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce x over ranks that use the total in different ways.

    Args:
        x: summand, of the same shape on all ranks.
        group: ranks that take part.

    Returns:
        The total, of the shape of `x`. The backward pass sums the gradients of all ranks.
    """
    return x if group.size() == 1 else _AllReduce.apply(x, group)


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x, which is identical on all ranks but used in different ways; the backward pass sums its gradient.

    Megatron's `copy_to_tensor_model_parallel_region` is not used, because before 0.19 it silently fails to reduce a
    non-contiguous gradient, such as einsum's.
    """
    return x if group.size() == 1 else _AllReduceGradient.apply(x, group)
