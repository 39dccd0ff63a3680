"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves paired as in GPT-NeoX and Llama."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.fusion import cut, fused


class Rotation(NamedTuple):
    """How far each position turns each pair of channels.

    Attributes:
        cos_tp: cosines [t, d / 2], fp32.
        sin_tp: sines.
    """

    cos_tp: Tensor
    sin_tp: Tensor


@lru_cache(maxsize=8)  # the layers of a model turn alike
def rotation(first_position: int, num_positions: int, width: int, base: float, device: torch.device) -> Rotation:
    """The rotation of consecutive positions.

    Args:
        first_position: of the first row.
        num_positions: rows.
        width: of a head, even.
        base: of the geometric frequencies.
        device: of the numbers.
    """
    positions = torch.arange(first_position, first_position + num_positions, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(width, base).to(device))
    return Rotation(angles.cos(), angles.sin())


def frequencies(width: int, base: float) -> Tensor:
    """Angle a position of each pair of channels, [width / 2], fp32, rounded as transformers and megatron-core round it.

    They compute 1 / base^(i / width) on the CPU. base^(-i / width) is the same number, and in fp32 often another last
    bit, which thousands of positions make an angle that is off by 1e-3.
    """
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def rotate(x_tbnd: Tensor, by: Rotation) -> Tensor:
    """Turn the pairs of each head's channels; computed in fp32, returned in x's dtype."""
    cos, sin = (y[:, None, None] for y in by)
    left, right = x_tbnd.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_tbnd.dtype)


@fused
def rotated_heads(x_tbuw: Tensor, by: Rotation, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Queries and keys, rotated, and what is behind them.

    Args:
        x_tbuw: a unit's queries, one or more of them, its key, and other parts.
        by: rotation of the positions.
        widths: of all queries, the key, the others.

    Returns:
        [b, t, heads, d], [b, t, u, d] and [b, t, u, width] for each other part, contiguous.
    """
    q, k, *others = cut(x_tbuw, widths)
    q = q.unflatten(-1, (-1, widths[1])).flatten(2, 3)
    q, k = rotate(q, by), rotate(k, by)
    return tuple(x.transpose(0, 1).contiguous() for x in (q, k, *others))
