"""The public form of the output layer's cross entropy: checks, and the choice of an implementation."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.dispatch import (
    check_floating,
    check_positive_int,
    check_shapes,
    choose_triton_or_reference,
    full_precision,
    triton_obstacle,
)
from kernels.linear_cross_entropy import reference, rows
from kernels.linear_cross_entropy.op import Rows, linear_cross_entropy_in_chunks

Implementation = Literal["auto", "chunked", "reference", "triton"]

CHUNK_BYTES = 2**29
"""Memory for logits of a chunk, where the caller names no size: some 5,000 rows of 50,000 in 16 bits, enough for
products of matrices at full speed."""


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
    """Cross entropy of hidden @ weight.T with labels, without all logits in memory at once.

    Logits are rounded to the dtype of hidden, as those of a linear are; everything after in fp32. Gradients are made
    in the forward pass, so that it takes as many operations as a linear's forward and backward pass.

    Args:
        hidden: [..., h], fp32, bf16, fp16 or float64.
        weight_vh: [v, h] in hidden's dtype: rows of the vocabulary that this rank has.
        labels: [...] int64, each a row of the whole vocabulary.
        counted: [...] bool, losses whose gradient counts; None: all. **In the backward pass all of these must get the
            same gradient, and the others zero**, as from a sum under a mask or its mean; another one is an error
            (of the device, on a GPU).
        first_label: label of this rank's first row.
        num_columns: rows of weight, from the first, that are labels, 0 to v; those after them fill the matrix up: they
            get no probability, and their gradient is zero. None: all.
        group: ranks that have the vocabulary's other rows, all of the same number; None: there are none. The gradient
            of hidden is this rank's part of a sum over the group, which is the caller's to make.
        chunk_size: rows of logits at a time; None: as many as take 512 MiB.
        implementation: "reference", all logits at once and by one rank alone; "chunked", plain torch; "triton"; "auto":
            triton on a GPU, else chunked.

    Returns:
        Losses [...] in nats, fp32 (float64 for float64), also of what is not counted.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Hsu et al. 2024, "Liger Kernel" (arXiv 2410.10989), section 3.2, for gradients in the forward pass; Shoeybi
    et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3, for a vocabulary over several ranks.
    """
    _check(hidden, weight_vh, labels, counted)
    num_columns = _checked_columns(num_columns, len(weight_vh))
    flat_nh, label_n = hidden.flatten(0, -2).contiguous(), labels.flatten().contiguous()
    obstacle = triton_obstacle(hidden=hidden)
    choice = choose_triton_or_reference(
        "linear_cross_entropy", implementation, hidden, obstacle, plain=("chunked", "reference")
    )
    with full_precision(hidden):
        if choice.name == "reference":
            if group is not None and group.size() > 1:
                raise ValueError(f"group has {group.size()} ranks: implementation 'reference' has one; use 'chunked'")
            return reference.linear_cross_entropy(flat_nh, weight_vh[:num_columns], label_n).view(labels.shape)
        counted_n = torch.ones_like(label_n, dtype=torch.bool) if counted is None else counted.flatten().contiguous()
        if chunk_size is None:
            chunk_size = max(1, CHUNK_BYTES // (len(weight_vh) * weight_vh.element_size()))
        check_positive_int("chunk_size", chunk_size)
        losses_n = linear_cross_entropy_in_chunks(
            flat_nh, weight_vh, label_n, counted_n, first_label, num_columns, group, chunk_size, _rows(choice.name)
        )
        return losses_n.view(labels.shape)


def _rows(form: str) -> Rows:
    """What computes of rows in a form; Triton is imported where it is used alone."""
    if form == "chunked":
        return rows
    from kernels.linear_cross_entropy import triton_rows

    return triton_rows


def _checked_columns(num_columns: int | None, rows: int) -> int:
    if num_columns is None:
        return rows
    if not 0 <= num_columns <= rows:
        raise ValueError(f"num_columns is {num_columns}: give 0 to {rows}, the rows of weight, or None")
    return num_columns


def _check(hidden: Tensor, weight_vh: Tensor, labels: Tensor, counted: Tensor | None) -> None:
    if hidden.dim() < 2 or hidden.numel() == 0:
        raise ValueError(f"hidden has shape {list(hidden.shape)}: give [..., features], none of them 0")
    if weight_vh.dim() != 2 or len(weight_vh) == 0:
        raise ValueError(f"weight has shape {list(weight_vh.shape)}: give [vocabulary, features], none of them 0")
    expected = {"weight": (weight_vh, (len(weight_vh), hidden.shape[-1])), "labels": (labels, hidden.shape[:-1])}
    if counted is not None:
        expected["counted"] = (counted, hidden.shape[:-1])
    check_shapes(hidden, expected, reader="hidden")
    check_floating(hidden=hidden, weight=weight_vh)
    if labels.dtype != torch.int64:
        raise ValueError(f"labels has dtype {labels.dtype}: give torch.int64")
    if counted is not None and counted.dtype != torch.bool:
        raise ValueError(f"counted has dtype {counted.dtype}: give torch.bool")
