"""Measured rates of the parts of a training step, as collected by `tools/collect_rates.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from statistics import median

from megatron_ext.model.step_parts import FEED_FORWARD, LOSS

RATES = "rates.json"
FORWARD_SHARE = 1 / 3
"""Fraction of a part's time in the forward pass, assumed if not measured: one of its three matrix products."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Measured rate.

    Attributes:
        part: name of a mixer, followed by its score if it has several (`top1_chunk approx`), or another part of a step.
        hidden_size: hidden size of the measured model.
        seq_length: tokens per sample.
        flops: model FLOP/s of forward and backward pass.
        forward_share: fraction of the time in the forward pass; None: not measured.
        source: file in docs/benchmarks.
        units: number of (sample, head or group) pairs that were mixed at a time, if too few to fill a GPU; else None.
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
    """Expected rate of a part.

    Attributes:
        flops: model FLOP/s of forward and backward pass, on the GPU kind of the measurements.
        forward_share: fraction of the time in the forward pass.
    """

    flops: float
    forward_share: float


def mixer_rate_name(mixer: str, score: str | None = None) -> str:
    """Return the name of a mixer's rates. Top-1 Chunk has separate rates for each score."""
    return f"{mixer} {score}" if mixer == "top1_chunk" else mixer


def feed_forward_rate_name(fp8: str) -> str:
    """Return the name of the feed-forward's rates for a value of `training.fp8`."""
    return FEED_FORWARD if fp8 == "none" else f"{FEED_FORWARD} {fp8}"


@cache
def measured_rates() -> tuple[Rate, ...]:
    """Return all measured rates of this package."""
    text = resources.files("megatron_ext.planning").joinpath(RATES).read_text()
    return tuple(Rate(**fields) for fields in json.loads(text))


def interpolate_rate(part: str, hidden_size: int, seq_length: int, rates: Sequence[Rate] | None = None) -> PartRate:
    """Interpolate the rate of a part between measurements at the nearest hidden size.

    Interpolation is linear in the logarithm of the sequence length. Beyond the measured lengths the rate is constant.

    Raises:
        KeyError: the part was not measured.
    """
    all_rates = measured_rates() if rates is None else rates
    part_rates = [rate for rate in all_rates if rate.part == part and rate.units is None]
    if not part_rates:
        raise KeyError(part)
    nearest_hidden_size = min(
        {rate.hidden_size for rate in part_rates}, key=lambda size: abs(math.log(size / hidden_size))
    )
    points = sorted((r for r in part_rates if r.hidden_size == nearest_hidden_size), key=lambda r: r.seq_length)
    return PartRate(
        flops=_interpolate([(r.seq_length, r.flops) for r in points], seq_length),
        forward_share=_interpolate([(r.seq_length, r.forward_share or FORWARD_SHARE) for r in points], seq_length),
    )


def is_measured(part: str) -> bool:
    """Return True if a part has a measured rate."""
    return any(rate.part == part for rate in measured_rates())


def mixer_rate(part: str, hidden_size: int, seq_length: int) -> PartRate:
    """Return the rate of a mixer, or the median rate of all measured mixers if this mixer was not measured."""
    if is_measured(part):
        return interpolate_rate(part, hidden_size, seq_length)
    others = sorted({rate.part for rate in measured_rates() if not rate.part.startswith((FEED_FORWARD, LOSS))})
    flops = median(interpolate_rate(other, hidden_size, seq_length).flops for other in others)
    return PartRate(flops=flops, forward_share=FORWARD_SHARE)


def occupancy(part: str, units: int, rates: Sequence[Rate] | None = None) -> float:
    """Return the fraction of its full rate that a part reaches with few units at a time.

    A recurrent scan over a sequence occupies only a small portion of the GPU. The fraction is interpolated linearly in
    the logarithm of the units, constant beyond the measurements, and 1 without measurements.

    Args:
        part: name of the part; see `Rate`.
        units: number of (sample, head or group) pairs that are mixed at a time.
        rates: measurements; None for those of this package.
    """
    part_rates = [rate for rate in (measured_rates() if rates is None else rates) if rate.part == part]
    points = sorted((rate.units, rate.flops) for rate in part_rates if rate.units is not None)
    return _interpolate(points, units) / points[-1][1] if points else 1.0


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    """Interpolate sorted points at `x`, linearly in log x. Beyond the points, return the nearest y."""
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return low + math.log(x / left) / math.log(right / left) * (high - low)
    return points[0][1] if x < points[0][0] else points[-1][1]
