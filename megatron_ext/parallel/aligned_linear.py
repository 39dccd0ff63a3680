"""A column-parallel linear whose outputs lie in memory as a GPU reads and multiplies them fast."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

MULTIPLE = 8
"""Of features: 16-bit ones then begin at a multiple of 16 bytes, which Hopper's fast loads ask for."""


class AlignedColumnParallelLinear(ColumnParallelLinear):
    """Megatron's linear, whose outputs may have zeros behind the features of each unit.

    A unit with a scalar, as a head of 3 * 64 + 1 features, would put most units, and the rows of the matrix product, at
    odd places. Without a bias.

    Attributes:
        units: whose rows the weight has on this rank, one after the other; None: outputs are as in Megatron. Else each
            unit has its features and zeros behind them up to a multiple of 8, which its caller leaves out; see
            `fusion.cut`.
    """

    units: int | None = None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        missing = 0 if self.units is None else -(len(weight) // self.units) % MULTIPLE
        if missing and not self.gradient_accumulation_fusion:  # which writes to the weight's own gradient
            weight = F.pad(weight.unflatten(0, (self.units, -1)), (0, 0, 0, missing)).flatten(0, 1)
        out: Tensor = super()._forward_impl(input, weight, *args, **kwargs)
        return out
