"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with halves paired as in GPT-NeoX and Llama."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.fusion import cut, fused
from kernels.common.tensor_cache import cached_tensors


class Rotation(NamedTuple):
    """Rotation of each pair of channels at each position.

    Attributes:
        cos_tp: cosines [t, d / 2], fp32.
        sin_tp: sines [t, d / 2], fp32.
    """

    cos_tp: Tensor
    sin_tp: Tensor


@cached_tensors(8)  # the layers of a model share a rotation
def rotation(first_position: int, num_positions: int, width: int, base: float, device: torch.device) -> Rotation:
    """Return the rotation of consecutive positions.

    Args:
        first_position: position of the first row.
        num_positions: number of rows.
        width: width of a head, even.
        base: base of the geometric frequencies.
        device: device of the result.
    """
    positions = torch.arange(first_position, first_position + num_positions, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(width, base).to(device))
    return Rotation(angles.cos(), angles.sin())


def frequencies(width: int, base: float) -> Tensor:
    """Return each channel pair's angle per position, [width / 2], fp32, rounded as in transformers and megatron-core.

    Both libraries compute 1 / base^(i / width) on the CPU. base^(-i / width) is mathematically equal, but often differs
    in the last bit of fp32. Over thousands of positions, the difference in the angle grows to 1e-3.
    """
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def rotate(x_tbnd: Tensor, by: Rotation) -> Tensor:
    """Rotate the channel pairs of each head in fp32, and return the result in the dtype of `x_tbnd`."""
    cos, sin = (y[:, None, None] for y in by)
    left, right = x_tbnd.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_tbnd.dtype)


@fused
def rotated_heads(x_tbuw: Tensor, by: Rotation, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Rotate queries and keys, and return them with the remaining features.

    Args:
        x_tbuw: features [queries | key | other features] of each head group, with one or more queries.
        by: rotation of the positions.
        widths: widths of all queries together, the key, and each other feature.

    Returns:
        [b, t, heads, d], [b, t, u, d] and [b, t, u, width] for each other feature, contiguous.
    """
    q, k, *others = cut(x_tbuw, widths)
    q = q.unflatten(-1, (-1, widths[1])).flatten(2, 3)
    q, k = rotate(q, by), rotate(k, by)
    return tuple(x.transpose(0, 1).contiguous() for x in (q, k, *others))
