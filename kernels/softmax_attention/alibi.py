"""The slopes of ALiBi (Press, Smith, Lewis 2022, "Train Short, Test Long", arXiv 2108.12409)."""

import torch
from torch import Tensor

from kernels.dispatch import check_positive_int


def alibi_slopes(num_heads: int) -> Tensor:
    """Give each head's slope as in the ALiBi paper and its published code.

    For n heads, n a power of two: 2**(-8 i / n), i = 1..n. Otherwise: those of the next lower power of two m, then
    every second one of 2m heads, from the first.

    Args:
        num_heads: number of query heads of the whole layer; a tensor-parallel rank takes its slice.

    Returns:
        fp32 [num_heads] on the CPU.

    Raises:
        ValueError: num_heads is not at least 1.
    """
    check_positive_int("num_heads", num_heads)
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(lower) + _geometric(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32)


def _geometric(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * i / num_heads) for i in range(1, num_heads + 1)]
