"""Chunked linear cross entropy: logits of a few rows at a time, their losses, and in the same pass their gradients.

The forward pass computes the gradients of the hidden states and the weight while a chunk's logits are in memory.
Otherwise the backward pass would have to recompute the logits, which is a third more work for the output layer. The
computed gradients are those of the sum of the counted losses. The backward pass scales them by the incoming gradient.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.dispatch import on_gpu


class Rows(Protocol):
    """Interface of the modules that process rows of logits. `rows` documents the functions."""

    def statistics(self, logits_nv: Tensor, label_n: Tensor, first_label: int, num_columns: int) -> Tensor:
        """Implement `rows.statistics`."""

    def differentiate(
        self, logits_nv: Tensor, lse_n: Tensor, label_n: Tensor, counted_n: Tensor, first_label: int, num_columns: int
    ) -> None:
        """Implement `rows.differentiate`."""


def linear_cross_entropy_in_chunks(
    hidden_nh: Tensor,
    weight_vh: Tensor,
    label_n: Tensor,
    counted_n: Tensor,
    first_label: int,
    num_columns: int,
    group: dist.ProcessGroup | None,
    chunk_size: int,
    rows: Rows,
) -> Tensor:
    """Compute the losses [n] chunk by chunk.

    Arguments as in `interface.linear_cross_entropy`, checked there, flattened and contiguous. `rows` is the module that
    processes the logits.
    """
    # Grad mode is read here, because it is always off inside `forward`.
    with_gradients = torch.is_grad_enabled() and (hidden_nh.requires_grad or weight_vh.requires_grad)
    options = (first_label, num_columns, group, chunk_size, rows, with_gradients)
    losses_n: Tensor = _LinearCrossEntropy.apply(hidden_nh, weight_vh, label_n, counted_n, options)
    return losses_n


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_nh: Tensor, weight_vh: Tensor, label_n: Tensor, counted_n: Tensor, options: tuple[Any, ...]
    ) -> Tensor:
        first_label, num_columns, group, chunk_size, rows, with_gradients = options
        accumulation_dtype = torch.promote_types(hidden_nh.dtype, torch.float32)
        losses_n = torch.empty(len(hidden_nh), dtype=accumulation_dtype, device=hidden_nh.device)
        if with_gradients:
            dhidden_nh, dweight_vh = torch.empty_like(hidden_nh), torch.zeros_like(weight_vh, dtype=accumulation_dtype)
        for begin in range(0, len(hidden_nh), chunk_size):
            chunk = slice(begin, begin + chunk_size)
            logits_cv = hidden_nh[chunk] @ weight_vh.T
            statistics_3c = rows.statistics(logits_cv, label_n[chunk], first_label, num_columns)
            lse_c, own_c = _reduce_over_ranks(statistics_3c, group)
            torch.sub(lse_c, own_c, out=losses_n[chunk])
            if with_gradients:
                rows.differentiate(logits_cv, lse_c, label_n[chunk], counted_n[chunk], first_label, num_columns)
                torch.mm(logits_cv, weight_vh, out=dhidden_nh[chunk])
                _add_product(dweight_vh, logits_cv.T, hidden_nh[chunk])
            del logits_cv  # otherwise the next chunk's logits are allocated while these are alive
        if with_gradients:
            ctx.save_for_backward(dhidden_nh, dweight_vh.to(weight_vh.dtype), counted_n)
        return losses_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_nh, dweight_vh, counted_n = ctx.saved_tensors
        factor = _common_factor(grad_n, counted_n)
        return dhidden_nh * factor.to(dhidden_nh.dtype), dweight_vh * factor.to(dweight_vh.dtype), None, None, None


def _reduce_over_ranks(statistics_3n: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the label's logit over the columns of all ranks."""
    if group is not None and group.size() > 1:
        statistics_r3n = statistics_3n.new_empty(group.size(), *statistics_3n.shape)
        dist.all_gather_into_tensor(statistics_r3n.flatten(0, 1), statistics_3n, group=group)
        return merge_ranks(statistics_r3n)
    highest_n, sum_n, own_n = statistics_3n
    return highest_n + sum_n.log(), own_n


def merge_ranks(statistics_r3n: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the outputs of `Rows.statistics` of r ranks to the log-sum-exp [n] and the label's logit [n].

    A rank without columns has a highest logit of -inf and contributes nothing.
    """
    highest_n = statistics_r3n[:, 0].amax(0)
    sum_n = (statistics_r3n[:, 1] * (statistics_r3n[:, 0] - highest_n).exp()).sum(0)
    return highest_n + sum_n.log(), statistics_r3n[:, 2].sum(0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total, in total's precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif on_gpu(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _common_factor(grad_n: Tensor, counted_n: Tensor) -> Tensor:
    """Return the common gradient [1] of the counted losses. A GPU checks asynchronously that they are equal."""
    first_1 = counted_n.int().argmax(0, keepdim=True)
    factor = grad_n.index_select(0, first_1) * counted_n.index_select(0, first_1)  # zero if no loss is counted
    are_equal = (grad_n == factor * counted_n) | ~grad_n.isfinite() | ~factor.isfinite()
    torch._assert_async(
        are_equal.all(), "linear_cross_entropy: gradients of the counted losses differ, or an uncounted loss has one"
    )
    return factor
