"""Column-parallel linear whose outputs are aligned in memory for fast GPU loads and matrix products."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

MULTIPLE = 8
"""Number of features of which each head group's width is a multiple: 16-bit head groups then start at multiples of 16
bytes, as Hopper's fast loads require.
"""


class AlignedColumnParallelLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear with optional zero padding behind the features of each head group; without
    bias.

    A head group with a scalar, such as a head of 3 * 64 + 1 features, would misalign most head groups and the rows of
    the matrix product.

    Attributes:
        head_groups: number of head groups on this rank, whose weight rows are consecutive. Each head group's output is
            padded with zeros to a multiple of 8 features, and the caller drops the padding (`fusion.cut`). None: no
            padding, as in Megatron.
    """

    head_groups: int | None = None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        missing = 0 if self.head_groups is None else -(len(weight) // self.head_groups) % MULTIPLE
        if missing and not self.gradient_accumulation_fusion:  # fusion writes to the weight's own gradient
            weight = F.pad(weight.unflatten(0, (self.head_groups, -1)), (0, 0, 0, missing)).flatten(0, 1)
        out: Tensor = super()._forward_impl(input, weight, *args, **kwargs)
        return out
