"""Statistics and gradients of rows of logits, in Triton. A program reads one row once and writes it at most once."""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.triton_math import next_power_of_two, on_device

BLOCK, WARPS = 4096, 8
"""Columns per iteration of a program: 16 per thread."""


@triton.jit(do_not_specialize=["first_label"])
def row_statistics(logits, label, output, num_rows, row_size, num_columns, first_label, BLOCK: tl.constexpr):
    """Write the statistics of each row of logits [num_rows, row_size]. Grid (num_rows).

    The first num_columns columns are labels. label: int64 [num_rows]; found: fp32 [3, num_rows], written.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_size
    highest, total = -float("inf"), 0.0
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < num_columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    label_column = tl.load(label + row) - first_label
    is_here = (label_column >= 0) & (label_column < num_columns)
    tl.store(output + row, highest)
    tl.store(output + num_rows + row, total)
    tl.store(output + 2 * num_rows + row, tl.load(logits + label_column, mask=is_here, other=0.0).to(tl.float32))


@triton.jit(do_not_specialize=["first_label"])
def row_gradient(logits, lse, label, counted, row_size, num_columns, first_label, BLOCK: tl.constexpr):
    """Overwrite logits [num_rows, row_size] by their gradient, with zeros from num_columns on. Grid (num_rows).

    lse: fp32 [num_rows]; label: int64 [num_rows]; counted: bool [num_rows].
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_size
    label_column = tl.load(label + row) - first_label
    row_lse, is_counted = tl.load(lse + row), tl.load(counted + row) != 0
    for start in range(0, row_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < num_columns, other=0.0).to(tl.float32)
        gradient = tl.exp(x - row_lse) - tl.where(column == label_column, 1.0, 0.0)
        # Not a product with zero: a NaN loss that is not counted must not produce NaN gradients.
        gradient = tl.where(is_counted & (column < num_columns), gradient, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < row_size)


def statistics(logits_nv: Tensor, label_n: Tensor, first_label: int, num_columns: int) -> Tensor:
    """Implement `rows.statistics` for contiguous logits in fp32 or 16 bits."""
    num_rows, row_size = logits_nv.shape
    output = torch.empty(3, num_rows, dtype=torch.float32, device=logits_nv.device)
    with on_device(logits_nv):
        row_statistics[(num_rows,)](
            logits_nv, label_n, output, num_rows, row_size, num_columns, first_label, **_tile(row_size)
        )
    return output


def differentiate(
    logits_nv: Tensor, lse_n: Tensor, label_n: Tensor, counted_n: Tensor, first_label: int, num_columns: int
) -> None:
    """Implement `rows.differentiate` for contiguous logits in fp32 or 16 bits."""
    num_rows, row_size = logits_nv.shape
    with on_device(logits_nv):
        row_gradient[(num_rows,)](
            logits_nv, lse_n, label_n, counted_n, row_size, num_columns, first_label, **_tile(row_size)
        )


def _tile(row_size: int) -> dict[str, int]:
    return {"BLOCK": min(BLOCK, next_power_of_two(row_size)), "num_warps": WARPS}
