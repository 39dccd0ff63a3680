"""How fast the parts of a step are, as it was measured; see `tools/collect_rates.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise

from megatron_ext.parts import FEED_FORWARD

RATES = "rates.json"
FORWARD_SHARE = 1 / 3
"""Of forward and backward pass together, where it was not measured: a product of matrices has two in the backward."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One measurement.

    Attributes:
        part: a mixer, with its score where it has several (`top1_chunk approx`), or another part of a step.
        hidden_size: of the model.
        seq_length: tokens a sample.
        flops: model FLOPs a second of forward and backward pass.
        forward_share: of the time; None: not told apart.
        source: file under docs/benchmarks.
        units: heads or groups of the mixer, of all samples, that were mixed at a time, in a measurement of what few of
            them take; None: as many as fill a GPU.
    """

    part: str
    hidden_size: int
    seq_length: int
    flops: float
    forward_share: float | None
    source: str
    units: int | None = None


@dataclass(frozen=True, kw_only=True)
class PartRate:
    """What is expected of a part.

    Attributes:
        flops: model FLOPs a second of forward and backward pass, on the GPU that was measured.
        forward_share: of the time.
    """

    flops: float
    forward_share: float


def part_of_mixer(mixer: str, score: str | None = None) -> str:
    """What a mixer's rates are kept under: Top-1 Chunk's differ by how chunks are scored."""
    return f"{mixer} {score}" if mixer == "top1_chunk" else mixer


def part_of_feed_forward(fp8: str) -> str:
    """What a feed-forward's rates are kept under, by `training.fp8`."""
    return FEED_FORWARD if fp8 == "none" else f"{FEED_FORWARD} {fp8}"


@cache
def measured() -> tuple[Rate, ...]:
    """All that come with this package."""
    text = resources.files("megatron_ext.planning").joinpath(RATES).read_text()
    return tuple(Rate(**fields) for fields in json.loads(text))


def rate_of(part: str, hidden_size: int, seq_length: int, rates: Sequence[Rate] | None = None) -> PartRate:
    """Between measurements of a part: along the logarithm of the length, at the nearest width; constant beyond them.

    Raises:
        KeyError: it was never measured.
    """
    everything = measured() if rates is None else rates
    own = [rate for rate in everything if rate.part == part and rate.units is None]
    if not own:
        raise KeyError(part)
    width = min({rate.hidden_size for rate in own}, key=lambda size: abs(math.log(size / hidden_size)))
    points = sorted((r for r in own if r.hidden_size == width), key=lambda r: r.seq_length)
    return PartRate(
        flops=_between([(r.seq_length, r.flops) for r in points], seq_length),
        forward_share=_between([(r.seq_length, r.forward_share or FORWARD_SHARE) for r in points], seq_length),
    )


def filled(part: str, units: int, rates: Sequence[Rate] | None = None) -> float:
    """What a part reaches of its rate with so few units at a time: a state walks over a sequence in one place of a GPU.

    Between measurements along the logarithm of the units; constant beyond them, and 1 where there are none.

    Args:
        part: as of `Rate`.
        units: heads or groups of all samples that are mixed at a time.
        rates: to go by; None: all that come with this package.
    """
    own = [rate for rate in (measured() if rates is None else rates) if rate.part == part]
    points = sorted((rate.units, rate.flops) for rate in own if rate.units is not None)
    return _between(points, units) / points[-1][1] if points else 1.0


def _between(points: Sequence[tuple[int, float]], at: int) -> float:
    """Along the logarithm of what comes first in points, which are in its order; constant beyond them."""
    for (left, low), (right, high) in pairwise(points):
        if left <= at <= right:
            return low + math.log(at / left) / math.log(right / left) * (high - low)
    return points[0][1] if at < points[0][0] else points[-1][1]
