"""Comparison of architectures at matched loss, with its uncertainty.

A run is a curve of evaluation loss (y) over the loss to match (x), with one point per evaluation. The matched loss is
the training loss, as in the study, or the in-domain validation loss. The curve is interpolated monotonically between
its points and unknown beyond them. Each architecture is compared with a baseline, down to the lowest loss that both
reached. So an architecture that learns slowly does not hide the others.

At a fixed x, the loss of a document is a weighted sum of its losses at the evaluations. A gap between two runs is
computed for each document, so that the difficulty of a document cancels. An interval covers documents, and seeds where
their spread is known. Without it, it covers what moves a single curve: the noise of a checkpoint, the batches in its
training loss, and the interpolation (`matched_losses`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from megatron_ext.analysis.architecture import Architecture, group_runs
from megatron_ext.analysis.baselines import BaselineGroup, baseline_groups
from megatron_ext.analysis.errors import Errors, family_half_widths
from megatron_ext.analysis.matched_losses import MatchedLoss, matched_loss, pooled_seed_variance
from megatron_ext.analysis.matched_runs import DomainSet, Match, MatchedRun, default_window, domain_set, matched_run
from megatron_ext.analysis.run_files import FloatArray, Split
from megatron_ext.analysis.runs import Run
from megatron_ext.utils.ratio_interval import SamplingVariance

ALL_DOMAINS = "all"
"""Domain name of the token-weighted mean over all domains of a split."""

GRID_POINTS = 48
"""Number of matched losses of the plotted gap curves, besides the tabulated levels."""

RESOLUTION = 0.004
"""Difference in nats per token below which the study treats two losses at equal training loss as the same."""

CONFIDENCE = 0.95
"""Confidence level of the intervals."""

POWER, NORMAL_POWER = 0.8, 0.84
"""Probability with which an interval would exclude zero for the smallest detectable gap, and the standard normal
quantile of that probability."""

NORMAL_HALF_WIDTH = 1.96
"""Half width of a 95 % interval of a normal variable, in standard errors."""

ROUNDING_ERROR = 1e-9
"""Nats per token below which a difference is rounding error."""


@dataclass(frozen=True)
class Estimate:
    """Estimate of a quantity at G matched losses.

    All fields are float64 [G]. They are NaN where a run was not evaluated. Errors and interval ends are also NaN with
    fewer than three documents.

    Attributes:
        value: value of the sample.
        error: standard error from all included sources.
        document_error: standard error over documents alone.
        low: lower end of the 95 % interval by Student's t.
        high: upper end of the interval.
        detectable: smallest difference from zero that the interval would exclude with probability `POWER`.
    """

    value: FloatArray
    error: FloatArray
    document_error: FloatArray
    low: FloatArray
    high: FloatArray
    detectable: FloatArray


@dataclass(frozen=True)
class Measurement:
    """Results of an architecture on a domain (or `ALL_DOMAINS`) of a split, at the matched losses of the comparison.

    Attributes:
        architecture: label of the architecture.
        baseline: label of the architecture that it is compared with; its own label for a baseline.
        split: `validation` (in domain), `test` (out of domain) or `test_in_domain`.
        domain: name of the domain.
        loss: nats per token, mean over seeds.
        gap: loss minus the baseline's loss at the same matched loss; zero for a baseline itself.
        seed_spread: float64 [G], standard deviation of the loss over seeds; NaN with one seed.
        curve_error: float64 [G], standard error of the gap from the curves between evaluations; a part of `gap.error`
            unless that includes seeds.
        documents: number of scored documents.
        tokens: number of scored tokens.
    """

    architecture: str
    baseline: str
    split: Split
    domain: str
    loss: Estimate
    gap: Estimate
    seed_spread: FloatArray
    curve_error: FloatArray
    documents: int
    tokens: int

    @property
    def is_baseline(self) -> bool:
        """True if the architecture is a baseline."""
        return self.architecture == self.baseline

    def documents_needed(self, level: int, difference: float = RESOLUTION) -> int | None:
        """Return the number of documents needed to detect a gap of `difference`.

        With this number of documents, the half width of the gap's 95 % interval from documents alone is `difference`.
        The standard error over documents falls with the square root of their number. More documents do not reduce the
        uncertainty from batches and seeds.

        Args:
            level: index of a matched loss.
            difference: nats per token, above 0.

        Returns:
            None if the standard error over documents is unknown (too few documents) or zero.
        """
        half_width = NORMAL_HALF_WIDTH * float(self.gap.document_error[level])
        if math.isnan(half_width) or half_width < ROUNDING_ERROR:
            return None
        return math.ceil(self.documents * (half_width / difference) ** 2)


@dataclass(frozen=True)
class SeedNoise:
    """Standard deviation over seeds of a single run's out-of-domain loss at matched loss.

    Attributes:
        deviation: nats per token, at the lowest matched loss at which it is known.
        degrees_of_freedom: number of runs less the number of architectures they belong to.
    """

    deviation: float
    degrees_of_freedom: int


@dataclass(frozen=True)
class Comparison:
    """Comparison of architectures at matched loss.

    Attributes:
        architectures: architectures, each baseline before those that are compared with it.
        groups: baselines with the architectures that are compared with them.
        match: the loss that is matched.
        window: number of steps over which the training loss is averaged.
        matched_losses: float64 [G] in nats per token, in descending order over the range of all pairs; empty if no
            architecture shares a range with its baseline.
        levels: indices in `matched_losses` of the tabulated losses.
        headlines: index of the lowest loss that an architecture and its baseline reached, by label. Architectures
            without a common loss are missing. For a baseline, the lowest of its group.
        measured: results of every architecture on every domain, and on all domains of each split together.
        family: interval of each gap at its headline that holds for all gaps at once with 95 % confidence (out of
            domain, all domains), by label; empty without at least two gaps that have an interval.
        seed_noise: spread of single runs over seeds; None if every architecture has one seed.
    """

    architectures: tuple[Architecture, ...]
    groups: tuple[BaselineGroup, ...]
    match: Match
    window: int
    matched_losses: FloatArray
    levels: tuple[int, ...]
    headlines: Mapping[str, int]
    measured: tuple[Measurement, ...]
    family: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seed_noise: SeedNoise | None = None

    @property
    def baseline(self) -> Architecture:
        """First baseline."""
        return self.architectures[0]

    @property
    def is_matched(self) -> bool:
        """True if an architecture has a matched loss in common with its baseline."""
        return bool(self.levels)

    @property
    def headline(self) -> int:
        """Index of the lowest of all matched losses at which an architecture is compared."""
        return max(self.headlines.values())

    def select(self, split: Split, domain: str = ALL_DOMAINS) -> list[Measurement]:
        """Return the results of all architectures on a domain, the baseline first; empty for an unevaluated split."""
        return [result for result in self.measured if result.split == split and result.domain == domain]

    def compared(self, split: Split, domain: str = ALL_DOMAINS) -> list[Measurement]:
        """Return the results of the architectures that have a matched loss in common with their baseline."""
        return [
            result
            for result in self.select(split, domain)
            if not result.is_baseline and result.architecture in self.headlines
        ]

    def verdict_interval(self, measured: Measurement) -> tuple[float, float]:
        """Return the out-of-domain interval of a gap at its headline; with several gaps, the one for all at once."""
        at = self.headlines[measured.architecture]
        single = float(measured.gap.low[at]), float(measured.gap.high[at])
        return self.family.get(measured.architecture, single)


def compare(
    runs: Sequence[Run], *, match: Match = "training", window: int | None = None, levels: int = 5
) -> Comparison:
    """Compare runs on the same data at matched loss.

    Args:
        runs: runs from `read_runs`. Runs that differ only in their seed are averaged.
        match: the loss that is matched.
        window: number of steps over which the training loss is averaged; None for `default_window`.
        levels: number of tabulated losses, evenly spaced, in addition to the lowest common one.

    Raises:
        UserError: two runs have the same architecture and seed, or a run lacks the validation loss that is matched.
    """
    window = default_window(runs) if window is None else window
    groups = baseline_groups(group_runs(runs))
    architectures = tuple(architecture for group in groups for architecture in (group.baseline, *group.others))
    matched_runs = {
        architecture.label: [matched_run(run, match, window) for run in architecture.runs]
        for architecture in architectures
    }
    ranges = _common_ranges(groups, matched_runs)
    grid, tabulated = _levels(ranges, levels)
    baselines = {other.label: group.baseline.label for group in groups for other in (group.baseline, *group.others)}
    headlines = {label: int(np.flatnonzero(grid == low)[0]) for label, (_, low) in ranges.items()}
    for group in groups:
        own = [headlines[other.label] for other in group.others if other.label in headlines]
        headlines |= {group.baseline.label: max(own)} if own else {}
    measured: list[Measurement] = []
    family: dict[str, tuple[float, float]] = {}
    seed_noise = None
    for split in get_args(Split):
        if match == "validation" and split == "validation":
            continue  # the matched loss itself
        for name, domains in _domain_sets(runs[0], split):
            losses = {label: matched_loss(own, domains, grid) for label, own in matched_runs.items()}
            other_seeds = pooled_seed_variance([loss.by_seed for loss in losses.values()])
            results = _measure(losses, baselines, ranges, grid, domains, name, other_seeds)
            measured += [measurement for measurement, _ in results]
            if (split, name) == ("test", ALL_DOMAINS):
                family = _family(results, headlines)
                seed_noise = _seed_noise(other_seeds)
    return Comparison(
        architectures, tuple(groups), match, window, grid, tabulated, headlines, tuple(measured), family, seed_noise
    )


def _common_ranges(
    groups: Sequence[BaselineGroup], matched_runs: Mapping[str, Sequence[MatchedRun]]
) -> dict[str, tuple[float, float]]:
    """Return the highest and lowest loss that all runs of an architecture and of its baseline reached, by label.

    Architectures without a common range are missing. An architecture that is compared with nothing has its own range.
    """
    ranges: dict[str, tuple[float, float]] = {}
    for group in groups:
        for other in group.others or (group.baseline,):
            runs = [*matched_runs[group.baseline.label], *matched_runs[other.label]]
            high, low = min(float(run.x.max()) for run in runs), max(float(run.x.min()) for run in runs)
            if high >= low:
                ranges[other.label] = high, low
    return ranges


def _levels(ranges: Mapping[str, tuple[float, float]], levels: int) -> tuple[FloatArray, tuple[int, ...]]:
    """Return the matched losses in descending order, and the indices of the tabulated losses.

    The grid contains the ends of every range, so that each headline is a point of it.

    Args:
        ranges: highest and lowest common loss of each comparison.
        levels: number of tabulated losses, in addition to the lowest one.
    """
    if not ranges:
        return np.empty(0), ()
    high, low = max(high for high, _ in ranges.values()), min(low for _, low in ranges.values())
    ends = [end for ends in ranges.values() for end in ends]
    tabulated = np.linspace(high, low, levels + 1) if high > low else np.array([low])
    drawn = np.linspace(high, low, GRID_POINTS)
    grid = np.unique(np.concatenate([ends, tabulated, drawn]))[::-1]
    return grid, tuple(int(np.flatnonzero(grid == level)[0]) for level in tabulated)


def _domain_sets(run: Run, split: Split) -> list[tuple[str, DomainSet]]:
    """Return all domains of a split together, then each by itself, with their names."""
    domains = run.split(split)
    if not domains:
        return []
    whole = (ALL_DOMAINS, domain_set(run, split, range(len(domains))))
    return [whole, *((domain.domain, domain_set(run, split, [index])) for index, domain in enumerate(domains))]


def _measure(
    losses: Mapping[str, MatchedLoss],
    baselines: Mapping[str, str],
    ranges: Mapping[str, tuple[float, float]],
    grid: FloatArray,
    domains: DomainSet,
    name: str,
    other_seeds: SamplingVariance | None,
) -> list[tuple[Measurement, Errors]]:
    """Return the results of all architectures on a set of domains, each with the errors of its gap."""
    results = []
    for label, loss in losses.items():
        baseline = losses[baselines[label]]
        errors = loss.errors(other_seeds)
        gap_errors = errors - baseline.errors(other_seeds)
        high, low = ranges.get(label, (-math.inf, math.inf))
        is_common = (grid <= high) & (grid >= low) | (baseline is loss)
        measurement = Measurement(
            architecture=label,
            baseline=baselines[label],
            split=domains.split,
            domain=name,
            loss=estimate(loss.value, errors),
            gap=estimate(np.where(is_common, loss.value - baseline.value, np.nan), gap_errors),
            seed_spread=_seed_deviation(loss.by_seed),
            curve_error=np.sqrt((loss.curve - baseline.curve).variance().variance),
            documents=len(domains.tokens),
            tokens=int(domains.tokens.sum()),
        )
        results.append((measurement, gap_errors))
    return results


def estimate(value: FloatArray, errors: Errors) -> Estimate:
    """Build an estimate from its values [G] and their errors."""
    error, half_width = np.sqrt(errors.variance().variance), errors.half_width(CONFIDENCE)
    detectable = half_width + NORMAL_POWER * error
    document_error = np.sqrt(errors.variance("documents", "matched documents").variance)
    low, high = value - half_width, value + half_width
    return Estimate(value, error, document_error, low, high, detectable)


def _seed_deviation(losses: FloatArray) -> FloatArray:
    """Return the standard deviation [G] over seeds of `losses` [seeds, G]; NaN with one seed."""
    return losses.std(axis=0, ddof=1) if len(losses) > 1 else np.full(losses.shape[1], np.nan)


def _seed_noise(other_seeds: SamplingVariance | None) -> SeedNoise | None:
    if other_seeds is None:
        return None
    return SeedNoise(math.sqrt(float(other_seeds.variance[-1])), int(other_seeds.degrees_of_freedom[-1]))


def _family(
    results: Sequence[tuple[Measurement, Errors]], headlines: Mapping[str, int]
) -> dict[str, tuple[float, float]]:
    """Return the intervals of all gaps at their headlines that hold at once; empty with fewer than two intervals."""
    gaps, errors = [], []
    for measurement, gap_errors in results:
        at = headlines.get(measurement.architecture)
        if at is not None and not measurement.is_baseline and measurement.gap.error[at] > ROUNDING_ERROR:
            gaps.append((measurement.architecture, float(measurement.gap.value[at])))
            errors.append(gap_errors.at(at))
    if len(gaps) < 2:
        return {}
    widths = family_half_widths(errors, CONFIDENCE)
    return {label: (value - width, value + width) for (label, value), width in zip(gaps, widths, strict=True)}
