"""Mixing of documents packed into one sample, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.common.fusion import shapes_vary
from kernels.common.tensor_cache import cached_tensors

PieceMix = Callable[[tuple[Tensor, ...], Tensor | None], Tensor]
"""Function that mixes b pieces of n positions each.

It takes features, [n, b, head groups, width] each, and shared features [n, b, width] or None. It returns mixed features
[n, b, head groups, output_width].
"""

BATCHED_DEVICES = ("cuda",)
"""Device types on which a call of `mix` costs more than padding, so that pieces of similar length are batched."""

MIN_PADDED_LENGTH = 64
"""Minimum padded length of a batched piece, in positions."""


def mix_by_document(
    mix: PieceMix, features_tbuw: Sequence[Tensor], shared_tbw: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """Mix each document separately, so that no information passes between documents.

    A mixer that accesses earlier positions only in `Mixer.mix` begins each sample of each call without history: keys,
    states, convolutions, chunks and positions. Each piece therefore becomes a sample. On a CPU, a call has a single
    sample. On devices in `BATCHED_DEVICES`, pieces of similar length share a call. Shorter pieces are padded with
    zeros at the end, which causal mixers never read.

    Args:
        mix: function that mixes pieces of equal length.
        features_tbuw: projected features, [t, b, head groups, width] each.
        shared_tbw: features that all head groups share, [t, b, width], or None.
        cu_seqlens: int [n + 1], ascending: offsets of the n pieces among the b * t tokens, row by row, and b * t at the
            end. A piece begins at the start of every row. Reading a GPU tensor synchronises; keep it on the CPU.

    Returns:
        [t, b, head groups, output_width].
    """
    t, b = features_tbuw[0].shape[:2]
    offsets: list[int] = cu_seqlens.tolist()
    assert {row * t for row in range(b + 1)} <= set(offsets), "pieces do not fit the batch"
    tensors = [*features_tbuw] if shared_tbw is None else [*features_tbuw, shared_tbw]
    flat = [x.transpose(0, 1).flatten(0, 1) for x in tensors]

    def mix_tensors(tensors: tuple[Tensor, ...]) -> Tensor:
        return mix(tensors, None) if shared_tbw is None else mix(tensors[:-1], tensors[-1])

    if features_tbuw[0].device.type in BATCHED_DEVICES:
        mixed = _mix_batched(mix_tensors, flat, offsets, t)
    else:
        mixed = _mix_each(mix_tensors, flat, offsets)
    return mixed.unflatten(0, (b, t)).transpose(0, 1)


def _mix_each(mix: Callable[[tuple[Tensor, ...]], Tensor], flat: list[Tensor], offsets: list[int]) -> Tensor:
    lengths = [end - start for start, end in pairwise(offsets)]
    # One split, so that the backward pass concatenates the gradients once.
    pieces = zip(*(x.unsqueeze(1).split(lengths) for x in flat), strict=True)
    return torch.cat([mix(piece) for piece in pieces]).squeeze(1)


def _mix_batched(
    mix: Callable[[tuple[Tensor, ...]], Tensor], flat: list[Tensor], offsets: list[int], max_length: int
) -> Tensor:
    shapes, rows = _plan_calls(tuple(offsets), max_length, flat[0].device)
    sizes = [length * pieces for length, pieces in shapes]
    padded = (x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, rows, x).split(sizes) for x in flat)
    with shapes_vary():
        mixed = [
            mix(tuple(x.unflatten(0, shape) for x in tensors)).flatten(0, 1)
            for shape, tensors in zip(shapes, zip(*padded, strict=True), strict=True)
        ]
    out: Tensor = _SelectRows.apply(torch.cat(mixed), rows)
    return out


@cached_tensors(2)
def _plan_calls(
    offsets: tuple[int, ...], max_length: int, device: torch.device
) -> tuple[list[tuple[int, int]], Tensor]:
    """Plan the calls of `mix`: pieces with the same padded length share a call. Cached for the following layers.

    Returns:
        (padded length, number of pieces) of each call, and int64 [tokens]: the row of each token in the concatenation
        of the calls' inputs, each flattened from [length, pieces].
    """
    calls: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(offsets):
        calls.setdefault(_padded_length(end - start, max_length), []).append((start, end))
    rows, first = torch.empty(offsets[-1], dtype=torch.int64), 0
    for length, pieces in calls.items():
        for sample, (start, end) in enumerate(pieces):
            rows[start:end] = first + sample + len(pieces) * torch.arange(end - start)
        first += length * len(pieces)
    return [(length, len(pieces)) for length, pieces in calls.items()], rows.to(device)


def _padded_length(length: int, max_length: int) -> int:
    """Round a piece's length up to a power of two or three quarters of a power of two, at least `MIN_PADDED_LENGTH`.

    The result is at most `max_length`. Rounding limits the number of different lengths, and thus of calls.
    """
    power = max(MIN_PADDED_LENGTH, 1 << (length - 1).bit_length())
    three_quarters = power * 3 // 4
    return min(three_quarters if power > MIN_PADDED_LENGTH and length <= three_quarters else power, max_length)


class _SelectRows(torch.autograd.Function):
    """`x.index_select(0, rows)` for distinct rows. The backward pass copies gradients instead of accumulating them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, rows, grad), None
