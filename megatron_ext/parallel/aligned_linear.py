"""A column-parallel linear whose matrix products have as many columns as a GPU's matrix units are fast with."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

MULTIPLE = 8
"""Of columns: rows of 16-bit numbers then begin at a multiple of 16 bytes, which Hopper's fast loads ask for."""


class AlignedColumnParallelLinear(ColumnParallelLinear):
    """Megatron's linear, with zeros behind the weight's rows where their number on a rank is not a multiple of 8.

    A projection with a scalar a head has such a number: 12 heads of 3 * 64 + 1 features. Without a bias.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        missing = -len(weight) % MULTIPLE
        if missing == 0 or self.gradient_accumulation_fusion:  # the fusion writes to the weight's own gradient
            return super()._forward_impl(input, weight, *args, **kwargs)
        out: Tensor = super()._forward_impl(input, F.pad(weight, (0, 0, 0, missing)), *args, **kwargs)
        return out[..., : len(weight)]
