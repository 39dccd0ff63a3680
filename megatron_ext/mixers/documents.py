"""Documents packed into one sample, each mixed as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

PieceMix = Callable[[tuple[Tensor, ...], Tensor | None], Tensor]
"""Mixes features [n, 1, units, width] and shared features [n, 1, width] of one piece: [n, 1, units, output_width]."""


def mix_by_document(
    mix: PieceMix, features_tbuw: Sequence[Tensor], shared_tbw: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """Mix each document's piece by itself, one after the other: nothing of another one can reach it.

    A mixer that looks back in `Mixer.mix` alone begins anew with each call of it: its keys, its states, its
    convolution, its chunks and its positions.

    Args:
        mix: of one piece.
        features_tbuw: projected features, [t, b, units, width] each.
        shared_tbw: what all units are given, [t, b, width], or None.
        cu_seqlens: int [n + 1], rising, where the n pieces begin among the b * t tokens, row after row, and b * t;
            every row begins one. On a GPU it is waited for; leave it on the CPU.

    Returns:
        [t, b, units, output_width].
    """
    t, b = features_tbuw[0].shape[:2]
    bounds: list[int] = cu_seqlens.tolist()
    assert {row * t for row in range(b + 1)} <= set(bounds), "pieces do not fit the batch"
    lengths = [end - start for start, end in pairwise(bounds)]
    of_pieces = zip(*(_pieces(x, lengths) for x in features_tbuw), strict=True)
    shared = [None] * len(lengths) if shared_tbw is None else _pieces(shared_tbw, lengths)
    mixed = [mix(features, given) for features, given in zip(of_pieces, shared, strict=True)]
    return torch.cat(mixed).squeeze(1).unflatten(0, (b, t)).transpose(0, 1)


def _pieces(x_tb: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """Cut [t, b, ...] row after row into pieces [n, 1, ...]; split at once, as their gradients are joined at once."""
    return x_tb.transpose(0, 1).flatten(0, 1).unsqueeze(1).split(lengths)
