"""Slopes of ALiBi (Press, Smith, Lewis 2022, "Train Short, Test Long", arXiv 2108.12409)."""

import torch
from torch import Tensor

from kernels.common.dispatch import check_positive_int


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head, as in the ALiBi paper and its published code.

    For a power of two n, the slopes are 2**(-8 i / n), i = 1..n. Otherwise, they are those of the next lower power of
    two m, followed by every second slope of 2m heads, starting with the first.

    Args:
        num_heads: number of query heads of the whole layer; a tensor-parallel rank takes its slice of the result.

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
