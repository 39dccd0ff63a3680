"""Statistics and gradients of rows of logits, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def statistics(logits_nv: Tensor, label_n: Tensor, first_label: int, num_columns: int) -> Tensor:
    """Compute the cross-entropy statistics of the columns on this rank.

    Args:
        logits_nv: [n, v], columns of a vocabulary.
        label_n: [n] int64, indices into the whole vocabulary.
        first_label: label of column 0.
        num_columns: number of leading columns that are labels, possibly 0; the remaining columns are ignored.

    Returns:
        [3, n] in fp32 (float64 for float64): the highest logit, -inf without columns; the sum of exp(logit - highest);
        the label's logit, or 0 if another rank has that column.
    """
    wide_nv = logits_nv[:, :num_columns].to(torch.promote_types(logits_nv.dtype, torch.float32))
    if num_columns == 0:
        highest_n, nothing_n = wide_nv.new_full((len(wide_nv),), -torch.inf), wide_nv.new_zeros(len(wide_nv))
        return torch.stack([highest_n, nothing_n, nothing_n])
    highest_n = wide_nv.amax(1)
    sum_n = (wide_nv - highest_n[:, None]).exp_().sum(1)
    column_n, is_here_n = _columns(num_columns, label_n, first_label)
    own_n = wide_nv.gather(1, column_n[:, None])[:, 0].where(is_here_n, 0.0)
    return torch.stack([highest_n, sum_n, own_n])


def differentiate(
    logits_nv: Tensor, lse_n: Tensor, label_n: Tensor, counted_n: Tensor, first_label: int, num_columns: int
) -> None:
    """Replace the logits by the gradient of the counted losses: softmax minus one at the label.

    Columns that are not labels, and rows that are not counted, get zeros.

    Args:
        logits_nv: [n, v], columns of a vocabulary; overwritten.
        lse_n: [n], log-sum-exp over the whole vocabulary.
        label_n: [n] int64, indices into the whole vocabulary.
        counted_n: [n] bool.
        first_label: label of column 0.
        num_columns: number of leading columns that are labels, possibly 0.
    """
    logits_nv[:, num_columns:] = 0
    if num_columns == 0:
        return
    logits_nv = logits_nv[:, :num_columns]
    gradient_nv = (logits_nv - lse_n[:, None]).exp_()
    column_n, is_here_n = _columns(num_columns, label_n, first_label)
    gradient_nv.scatter_add_(1, column_n[:, None], -is_here_n.to(gradient_nv.dtype)[:, None])
    # Not a product with zero: a NaN loss that is not counted must not produce NaN gradients.
    logits_nv.copy_(gradient_nv.where(counted_n[:, None], 0.0))


def _columns(num_columns: int, label_n: Tensor, first_label: int) -> tuple[Tensor, Tensor]:
    """Return the label's column, 0 if it is on another rank, and a mask of the labels on this rank."""
    column_n = label_n - first_label
    is_here_n = (column_n >= 0) & (column_n < num_columns)
    return column_n.where(is_here_n, 0), is_here_n
