"""What is computed of some rows of logits, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def statistics(logits_nv: Tensor, label_n: Tensor, first_label: int, num_columns: int) -> Tensor:
    """What the cross entropy needs of the columns that are here.

    Args:
        logits_nv: [n, v], columns of a vocabulary.
        label_n: [n] int64, of the whole vocabulary.
        first_label: label of column 0.
        num_columns: columns from the first that are labels, possibly none; the others count for nothing.

    Returns:
        [3, n] in fp32 (float64 for float64): the highest logit, -inf of no columns; the sum of exp(logit - highest);
        the label's logit, or 0 where another rank has that column.
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
    """Replace logits by the gradient of the losses that are counted: softmax less one at the label.

    Columns that are no labels get zeros.

    Args:
        logits_nv: see `statistics`.
        lse_n: [n], logarithm of the sum of exp over the whole vocabulary.
        label_n: see `statistics`.
        counted_n: [n] bool.
        first_label: see `statistics`.
        num_columns: see `statistics`.
    """
    logits_nv[:, num_columns:] = 0
    if num_columns == 0:
        return
    logits_nv = logits_nv[:, :num_columns]
    gradient_nv = (logits_nv - lse_n[:, None]).exp_()
    column_n, is_here_n = _columns(num_columns, label_n, first_label)
    gradient_nv.scatter_add_(1, column_n[:, None], -is_here_n.to(gradient_nv.dtype)[:, None])
    # Not multiplied by zero: a loss that is not counted must not spoil gradients where it is not a number.
    logits_nv.copy_(gradient_nv.where(counted_n[:, None], 0.0))


def _columns(num_columns: int, label_n: Tensor, first_label: int) -> tuple[Tensor, Tensor]:
    """The label's column, 0 where it is not here, and whether it is."""
    column_n = label_n - first_label
    is_here_n = (column_n >= 0) & (column_n < num_columns)
    return column_n.where(is_here_n, 0), is_here_n
