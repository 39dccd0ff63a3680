"""Public interface of the output layer's cross entropy: argument checks and choice of an implementation."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.common.dispatch import (
    check_floating,
    check_positive_int,
    check_shapes,
    choose_triton_or_reference,
    full_precision,
    triton_unsupported_reason,
)
from kernels.linear_cross_entropy import reference, rows
from kernels.linear_cross_entropy.op import Rows, linear_cross_entropy_in_chunks

Implementation = Literal["auto", "chunked", "reference", "triton"]

CHUNK_BYTES = 2**29
"""Default memory for the logits of a chunk. It holds about 5,000 rows for a vocabulary of 50,000 in 16 bits, enough
for matrix products at full speed."""


def linear_cross_entropy(
    hidden: Tensor,
    weight_vh: Tensor,
    labels: Tensor,
    counted: Tensor | None = None,
    *,
    first_label: int = 0,
    num_columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Cross entropy of hidden @ weight.T with labels that never materialises all logits.

    Logits are rounded to the dtype of hidden, as a linear layer does; all later steps are in fp32. The forward pass
    also computes the gradients, so that the cost equals that of a linear layer's forward and backward pass.

    Args:
        hidden: [..., h], fp32, bf16, fp16 or float64.
        weight_vh: [v, h] in hidden's dtype, this rank's rows of the vocabulary.
        labels: [...] int64, indices into the whole vocabulary.
        counted: [...] bool, True for the losses that contribute to the gradient; None for all. **The backward pass must
            give all counted losses the same gradient, and the others zero**, as a masked sum or mean does. Any other
            gradient raises an error (a device-side assertion on a GPU).
        first_label: label of this rank's first row.
        num_columns: number of leading rows of weight that are labels, 0 to v; None for all. The remaining rows are
            padding: they have no probability and a zero gradient.
        group: ranks that share the vocabulary, each with the same number of rows; None for one rank. The gradient of
            hidden is this rank's partial sum, and the caller must sum it over the group.
        chunk_size: rows of logits per chunk; None for as many as fit in 512 MiB.
        implementation: "reference", which computes all logits at once on a single rank; "chunked" in plain torch;
            "triton"; "auto" for Triton on a GPU, else chunked.

    Returns:
        Losses [...] in nats, fp32 (float64 for float64), including those that are not counted.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Hsu et al. 2024, "Liger Kernel" (arXiv 2410.10989), section 3.2, for gradients in the forward pass; Shoeybi
    et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3, for a vocabulary sharded over ranks.
    """
    _check(hidden, weight_vh, labels, counted)
    num_columns = _checked_columns(num_columns, len(weight_vh))
    flat_nh, label_n = hidden.flatten(0, -2).contiguous(), labels.flatten().contiguous()
    unsupported_reason = triton_unsupported_reason(hidden=hidden)
    choice = choose_triton_or_reference(
        "linear_cross_entropy", implementation, hidden, unsupported_reason, plain=("chunked", "reference")
    )
    with full_precision(hidden):
        if choice.name == "reference":
            _check_single_rank(group)
            return reference.linear_cross_entropy(flat_nh, weight_vh[:num_columns], label_n).view(labels.shape)
        counted_n = torch.ones_like(label_n, dtype=torch.bool) if counted is None else counted.flatten().contiguous()
        chunk_size = _resolve_chunk_size(chunk_size, weight_vh)
        losses_n = linear_cross_entropy_in_chunks(
            flat_nh, weight_vh, label_n, counted_n, first_label, num_columns, group, chunk_size, _rows(choice.name)
        )
        return losses_n.view(labels.shape)


def _rows(implementation: str) -> Rows:
    """Return the module that implements the operations on rows of logits. Triton is imported only if it is used."""
    if implementation == "chunked":
        return rows
    from kernels.linear_cross_entropy import triton_rows

    return triton_rows


def _resolve_chunk_size(chunk_size: int | None, weight_vh: Tensor) -> int:
    if chunk_size is None:
        return max(1, CHUNK_BYTES // (len(weight_vh) * weight_vh.element_size()))
    check_positive_int("chunk_size", chunk_size)
    return chunk_size


def _check_single_rank(group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        raise ValueError(f"group has {group.size()} ranks: implementation 'reference' needs one; use 'chunked'")


def _checked_columns(num_columns: int | None, rows: int) -> int:
    if num_columns is None:
        return rows
    if not 0 <= num_columns <= rows:
        raise ValueError(f"num_columns is {num_columns}: give 0 to {rows}, the rows of weight, or None")
    return num_columns


def _check(hidden: Tensor, weight_vh: Tensor, labels: Tensor, counted: Tensor | None) -> None:
    if hidden.dim() < 2 or hidden.numel() == 0:
        raise ValueError(f"hidden has shape {list(hidden.shape)}: give [..., features], all at least 1")
    if weight_vh.dim() != 2 or len(weight_vh) == 0:
        raise ValueError(f"weight has shape {list(weight_vh.shape)}: give [vocabulary, features], all at least 1")
    expected = {"weight": (weight_vh, (len(weight_vh), hidden.shape[-1])), "labels": (labels, hidden.shape[:-1])}
    if counted is not None:
        expected["counted"] = (counted, hidden.shape[:-1])
    check_shapes(hidden, expected, main_name="hidden")
    check_floating(hidden=hidden, weight=weight_vh)
    if labels.dtype != torch.int64:
        raise ValueError(f"labels has dtype {labels.dtype}: give torch.int64")
    if counted is not None and counted.dtype != torch.bool:
        raise ValueError(f"counted has dtype {counted.dtype}: give torch.bool")
