"""Comparison of architectures at matched training loss, with the uncertainty from documents and training batches.

A run is a curve of evaluation loss (y) over training loss (x), with one point per evaluation. The curve is linear
between its points and unknown beyond them. A comparison is therefore restricted to training losses in the range of
every run.

At a fixed x, the loss of a document is a weighted sum of its losses at the evaluations, with the same weights for all
documents. A gap between two runs is computed for each document in the same way, so that the difficulty of a document
cancels. The spread of losses and gaps over documents is that of a ratio of sums (`ratio_variance`).

The second source of uncertainty is the training loss, a mean over the few batches of a window. An error of the training
loss moves a point along x. The effect is that of a shift along y by the error times the slope of the curve. In short
runs, this is the larger source. The scatter of batches within each window is therefore included (`matched_spread`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from megatron_ext.analysis.architecture import Architecture, group_runs
from megatron_ext.analysis.matched_spread import InterpolatedRun, PooledDomains, batch_noise, interpolate_domain
from megatron_ext.analysis.run_files import FloatArray, Split
from megatron_ext.analysis.runs import Run

ALL_DOMAINS = "all"
"""Domain name of the token-weighted mean over all domains of a split."""

MAX_WINDOW = 20
"""Maximum averaging window in steps: long enough to average out most of the noise of single batches, and so short that
the loss changes little."""

GRID_POINTS = 48
"""Number of training losses of the plotted gap curves, besides the tabulated levels."""

RESOLUTION = 0.004
"""Difference in nats per token below which the study treats two losses at equal training loss as the same."""

CONFIDENCE = 0.95
"""Confidence level of the intervals."""

NORMAL_HALF_WIDTH = 1.96
"""Half width of a 95 % interval of a normal variable, in standard errors."""

ROUNDING_ERROR = 1e-9
"""Nats per token below which a difference is rounding error."""


@dataclass(frozen=True)
class Estimate:
    """Estimate of a quantity at G training losses.

    All fields are float64 [G]. Errors and interval ends are NaN with fewer than three documents.

    Attributes:
        value: value of the sample.
        error: standard error over documents and training batches.
        document_error: standard error over documents alone.
        low: lower end of the 95 % interval by Student's t. It covers the choice of evaluated documents within each
            domain, and of the batches in the training loss. It does not cover seeds, training data and the shape of
            the curve between evaluations.
        high: upper end of the interval.
    """

    value: FloatArray
    error: FloatArray
    document_error: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True)
class Measurement:
    """Results of an architecture on a domain (or `ALL_DOMAINS`) of a split, at the training losses of the comparison.

    Attributes:
        architecture: label of the architecture.
        split: `validation` (in domain), `test` (out of domain) or `test_in_domain`.
        domain: name of the domain.
        loss: nats per token, mean over seeds.
        gap: loss minus the baseline's loss at the same training loss; zero for the baseline itself.
        seed_spread: float64 [G], standard deviation of the loss over seeds; NaN with one seed.
        documents: number of scored documents.
        tokens: number of scored tokens.
    """

    architecture: str
    split: Split
    domain: str
    loss: Estimate
    gap: Estimate
    seed_spread: FloatArray
    documents: int
    tokens: int

    def documents_needed(self, level: int, difference: float = RESOLUTION) -> int | None:
        """Return the number of documents needed to detect a gap of `difference`.

        With this number of documents, the half width of the gap's 95 % interval from documents alone is `difference`.
        The standard error over documents falls with the square root of their number. More documents do not reduce the
        uncertainty from batches and seeds.

        Args:
            level: index of a training loss.
            difference: nats per token, above 0.

        Returns:
            None if the standard error over documents is unknown (too few documents) or zero.
        """
        half_width = NORMAL_HALF_WIDTH * float(self.gap.document_error[level])
        if math.isnan(half_width) or half_width < ROUNDING_ERROR:
            return None
        return math.ceil(self.documents * (half_width / difference) ** 2)


@dataclass(frozen=True)
class Comparison:
    """Comparison of architectures at matched training loss.

    Attributes:
        architectures: architectures, the baseline first.
        window: number of steps over which the training loss is averaged.
        training_losses: float64 [G] in nats per token, in descending order over the range that all runs share; empty if
            the runs share no range.
        levels: indices in `training_losses` of the tabulated losses; the last index is `headline`.
        measured: results of every architecture on every domain, and on all domains of each split together.
    """

    architectures: tuple[Architecture, ...]
    window: int
    training_losses: FloatArray
    levels: tuple[int, ...]
    measured: tuple[Measurement, ...]

    @property
    def baseline(self) -> Architecture:
        """Architecture that the gaps refer to."""
        return self.architectures[0]

    @property
    def is_matched(self) -> bool:
        """True if the runs have a training loss in common."""
        return bool(self.levels)

    @property
    def headline(self) -> int:
        """Index of the lowest training loss that every run reached."""
        return self.levels[-1]

    def select(self, split: Split, domain: str = ALL_DOMAINS) -> list[Measurement]:
        """Return the results of all architectures on a domain, the baseline first; empty for an unevaluated split."""
        return [result for result in self.measured if result.split == split and result.domain == domain]


def compare(runs: Sequence[Run], *, window: int | None = None, levels: int = 5) -> Comparison:
    """Compare runs on the same data at matched training loss.

    Args:
        runs: runs from `read_runs`. Runs that differ only in their seed are averaged.
        window: number of steps over which the training loss is averaged; None for `default_window`.
        levels: number of tabulated training losses, evenly spaced, in addition to the lowest common one.

    Raises:
        UserError: two runs have the same architecture and seed.
    """
    window = default_window(runs) if window is None else window
    architectures = tuple(group_runs(runs))
    training_losses = [[training_loss(run, window) for run in architecture.runs] for architecture in architectures]
    flat_losses = [losses for by_run in training_losses for losses in by_run]
    grid, indices = _levels(
        min(losses.max() for losses in flat_losses), max(losses.min() for losses in flat_losses), levels
    )
    interpolated = [
        [
            InterpolatedRun(run, x, grid, interpolation_weights(x, grid), batch_noise(run, window))
            for run, x in zip(architecture.runs, by_run, strict=True)
        ]
        for architecture, by_run in zip(architectures, training_losses, strict=True)
    ]
    labels = [architecture.label for architecture in architectures]
    measured: list[Measurement] = []
    for split in get_args(Split):
        measured += _measure_split(labels, interpolated, split)
    return Comparison(architectures, window, grid, indices, tuple(measured))


def default_window(runs: Sequence[Run]) -> int:
    """Return the averaging window of the training loss: the shortest evaluation interval of any run, at most 20 steps.

    The loss of a single step is noisy: the noise of one batch would move a point along x by more than the gaps of
    interest. With the same window in all runs, averaging delays all curves equally.
    """
    shortest = min(int(np.diff(run.evaluation_steps, prepend=0).min()) for run in runs)
    return min(shortest, MAX_WINDOW)


def training_loss(run: Run, window: int) -> FloatArray:
    """Return the training loss [E] at each evaluation in nats per token: the mean over the last `window` steps."""
    ends = np.searchsorted(run.steps, run.evaluation_steps, side="right")
    starts = np.searchsorted(run.steps, run.evaluation_steps - window, side="right")
    sums = np.concatenate([[0.0], np.cumsum(run.losses)])
    return (sums[ends] - sums[starts]) / (ends - starts)


def interpolation_weights(x: FloatArray, at: FloatArray) -> FloatArray:
    """Return the weights [G, E] of a linear interpolation from points `x` [E] to `at` [G].

    Points are sorted by x, not by time. Values at equal x are averaged.

    Raises:
        ValueError: a point of `at` is outside the range of `x`; there is no extrapolation.
    """
    if at.size and (at.min() < x.min() or at.max() > x.max()):
        raise ValueError(f"[{at.min()}, {at.max()}] is not within the measured range [{x.min()}, {x.max()}]")
    unique, index, counts = np.unique(x, return_inverse=True, return_counts=True)
    mean = (index == np.arange(len(unique))[:, None]) / counts[:, None]
    weights = np.stack([np.interp(at, unique, unit) for unit in np.eye(len(unique))], axis=1)
    return weights @ mean


def _levels(high: float, low: float, levels: int) -> tuple[FloatArray, tuple[int, ...]]:
    """Return the training losses of the comparison in descending order, and the indices of the tabulated losses.

    Args:
        high: highest training loss in the range of every run.
        low: lowest training loss in the range of every run; above `high` if the ranges do not overlap.
        levels: number of tabulated losses, in addition to the lowest one.
    """
    if low > high:
        return np.empty(0), ()
    if high == low:
        return np.array([low]), (0,)
    tabulated = np.linspace(high, low, levels + 1)
    grid = np.unique(np.concatenate([tabulated, np.linspace(high, low, GRID_POINTS)]))[::-1]
    return grid, tuple(int(np.flatnonzero(grid == level)[0]) for level in tabulated)


def _measure_split(
    labels: Sequence[str], interpolated: Sequence[Sequence[InterpolatedRun]], split: Split
) -> list[Measurement]:
    """Return the results of all architectures on all domains together, then on each domain."""
    domains = interpolated[0][0].run.split(split)
    if not domains:
        return []
    losses = [interpolate_domain(interpolated, split, index) for index in range(len(domains))]
    num_documents = [len(domain.documents) for domain in domains]
    measured = _measure_domain(labels, split, ALL_DOMAINS, PooledDomains(losses), sum(num_documents))
    for domain, domain_losses, count in zip(domains, losses, num_documents, strict=True):
        measured += _measure_domain(labels, split, domain.domain, PooledDomains([domain_losses]), count)
    return measured


def _measure_domain(
    labels: Sequence[str], split: Split, domain: str, pooled: PooledDomains, documents: int
) -> list[Measurement]:
    return [
        Measurement(
            architecture=label,
            split=split,
            domain=domain,
            loss=_estimate(pooled.signs(a), pooled),
            gap=_estimate(pooled.signs(a, baseline=0), pooled),
            seed_spread=_seed_deviation(pooled.seeds(a)),
            documents=documents,
            tokens=pooled.tokens,
        )
        for a, label in enumerate(labels)
    ]


def _estimate(signs: FloatArray, pooled: PooledDomains) -> Estimate:
    """Estimate a signed sum of the architectures' losses with its uncertainty."""
    value, documents = pooled.value(signs), pooled.over_documents(signs)
    total = documents + pooled.over_batches(signs)
    half_width = total.half_width(CONFIDENCE)
    return Estimate(value, np.sqrt(total.variance), np.sqrt(documents.variance), value - half_width, value + half_width)


def _seed_deviation(losses: FloatArray) -> FloatArray:
    """Return the standard deviation [G] over seeds of `losses` [seeds, G]; NaN with one seed."""
    return losses.std(axis=0, ddof=1) if len(losses) > 1 else np.full(losses.shape[1], np.nan)
