"""Architectures compared at matched training loss, with the uncertainty from the choice of documents and of batches.

A run is read as a curve: training loss on x, evaluation loss on y, one point an evaluation. Between its points the
curve is linear; beyond them it is unknown, so a comparison keeps to the training losses that every run has passed.

Because x is held fixed, the loss at a given x is a fixed weighting of the losses at the evaluations, and so is a gap,
for each document: what makes a document hard for all runs cancels in it. Its spread over documents is that of a ratio
of sums (`spread_of_ratio`).

Documents are not all: the batches of a window are few too, and an error of the training loss moves a point along x,
which is as good as moving it along y by the slope of the curve. On short runs that is the larger part. So the scatter
of the batches within each window counts as well (`matched_spread`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from megatron_ext.analysis.architecture import Architecture, group_runs
from megatron_ext.analysis.matched_spread import Reading, Together, batch_noise, read_domain
from megatron_ext.analysis.runs import FloatArray, Run, Split

ALL_DOMAINS = "all"
"""Name of the token-weighted mean over a split's domains."""

LONGEST_WINDOW = 20
"""Steps: enough to average out most of a batch's own noise, short beside the change of the loss over a run."""

GRID_POINTS = 48
"""Training losses at which the plotted curves are evaluated between the levels."""

RESOLUTION = 0.004
"""Nats a token within which the study calls two losses at equal training loss the same."""

CONFIDENCE = 0.95
"""Of the intervals."""

NORMAL_HALF_WIDTH = 1.96
"""Standard errors on each side of a 95 % interval."""

ROUNDING = 1e-9
"""Nats a token; differences below are of the arithmetic, not of documents."""


@dataclass(frozen=True)
class Estimate:
    """A quantity at G training losses; all [G], not a number where fewer than three documents say nothing of it.

    Attributes:
        value: on the sample as it is.
        error: standard error over documents and training batches.
        document_error: standard error over documents alone.
        low: lower end of the 95 % interval over documents and batches, by Student's t. Evaluated documents vary in it,
            within each domain, and batches behind the training loss; seeds, training data and what the curve does
            between evaluations do not.
        high: upper end.
    """

    value: FloatArray
    error: FloatArray
    document_error: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True)
class Measured:
    """One architecture on one domain (or `ALL_DOMAINS`) of one split, at the training losses of its comparison.

    Attributes:
        architecture: label.
        split: `validation` (in-domain), `test` (out-of-domain) or `test_in_domain`.
        domain: name.
        loss: nats a token, mean over seeds.
        gap: loss minus the baseline's at the same training loss; zero for the baseline itself.
        seed_spread: [G] standard deviation of the loss over seeds; NaN with one seed.
        documents: how many were scored: what the uncertainty rests on.
        tokens: how many were scored.
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
        """Documents of this kind that would tell a gap of `difference` from none; None: these do not say.

        They say it by how they differ, which one document does not, nor several of which each is a domain's only one.

        With as many the 95 % interval of the gap is `difference` on each side, as far as it comes from documents: their
        part of the standard error falls with the root of their number. Batches and seeds are no matter of documents.

        Args:
            level: index of a training loss.
            difference: nats a token, above 0.
        """
        half_width = NORMAL_HALF_WIDTH * float(self.gap.document_error[level])
        if math.isnan(half_width) or half_width < ROUNDING:
            return None
        return math.ceil(self.documents * (half_width / difference) ** 2)


@dataclass(frozen=True)
class Comparison:
    """Architectures at matched training loss.

    Attributes:
        architectures: the baseline first.
        window: steps over which a training loss is averaged.
        training_losses: [G] falling, nats a token, from the highest to the lowest that all runs share; [0]: they share
            none.
        levels: indices into `training_losses` of the tabulated levels; the last one is the headline.
        measured: every architecture on every domain and on all domains of each split.
    """

    architectures: tuple[Architecture, ...]
    window: int
    training_losses: FloatArray
    levels: tuple[int, ...]
    measured: tuple[Measured, ...]

    @property
    def baseline(self) -> Architecture:
        """What the gaps are against."""
        return self.architectures[0]

    @property
    def is_matched(self) -> bool:
        """Whether the runs have a training loss in common."""
        return bool(self.levels)

    @property
    def headline(self) -> int:
        """Index of the lowest training loss that every run reached."""
        return self.levels[-1]

    def select(self, split: Split, domain: str = ALL_DOMAINS) -> list[Measured]:
        """Every architecture on one domain, the baseline first; empty where the split was not evaluated."""
        return [one for one in self.measured if one.split == split and one.domain == domain]


def compare(runs: Sequence[Run], *, window: int | None = None, levels: int = 5) -> Comparison:
    """Compare runs over the same data at matched training loss, as far as they have one in common.

    Args:
        runs: from `read_runs`; those that differ in their seed alone are averaged.
        window: steps over which the training loss is averaged; None: `default_window`.
        levels: tabulated training losses, evenly spaced, above the lowest common one.

    Raises:
        UserError: one setting and seed is there twice.
    """
    window = default_window(runs) if window is None else window
    architectures = tuple(group_runs(runs))
    curves = [[training_loss(run, window) for run in one.runs] for one in architectures]
    every = [x for xs in curves for x in xs]
    grid, indices = _levels(min(x.max() for x in every), max(x.min() for x in every), levels)
    readings = [
        [
            Reading(run, x, grid, interpolation_weights(x, grid), batch_noise(run, window))
            for run, x in zip(one.runs, xs, strict=True)
        ]
        for one, xs in zip(architectures, curves, strict=True)
    ]
    labels = [one.label for one in architectures]
    measured: list[Measured] = []
    for split in get_args(Split):
        measured += _measure_split(labels, readings, split)
    return Comparison(architectures, window, grid, indices, tuple(measured))


def default_window(runs: Sequence[Run]) -> int:
    """Steps a training loss is averaged over: the shortest stretch between evaluations in any run, at most 20.

    The loss of one step is that of one batch, and its noise would move a point along x by more than the gaps looked
    for. The same window in all runs makes the lag that averaging brings the same too.
    """
    shortest = min(int(np.diff(run.evaluation_steps, prepend=0).min()) for run in runs)
    return min(shortest, LONGEST_WINDOW)


def training_loss(run: Run, window: int) -> FloatArray:
    """[E] training loss at each evaluation: mean over the `window` steps that end with it, nats a token."""
    ends = np.searchsorted(run.steps, run.evaluation_steps, side="right")
    starts = np.searchsorted(run.steps, run.evaluation_steps - window, side="right")
    sums = np.concatenate([[0.0], np.cumsum(run.losses)])
    return (sums[ends] - sums[starts]) / (ends - starts)


def interpolation_weights(x: FloatArray, at: FloatArray) -> FloatArray:
    """[G, E] weights that turn values at points `x` [E] into linear interpolations at `at` [G].

    Points are taken in the order of x, not of time; the values of points with equal x are averaged.

    Raises:
        ValueError: a point of `at` lies outside the range of `x`: nothing is extrapolated.
    """
    if at.size and (at.min() < x.min() or at.max() > x.max()):
        raise ValueError(f"[{at.min()}, {at.max()}] is not within the measured range [{x.min()}, {x.max()}]")
    unique, index, counts = np.unique(x, return_inverse=True, return_counts=True)
    mean = (index == np.arange(len(unique))[:, None]) / counts[:, None]
    hats = np.stack([np.interp(at, unique, unit) for unit in np.eye(len(unique))], axis=1)
    return hats @ mean


def _levels(high: float, low: float, levels: int) -> tuple[FloatArray, tuple[int, ...]]:
    """Training losses to look at, falling, and which of them are tabulated: `levels` and the lowest one.

    Args:
        high: the highest training loss that every run has passed at its evaluations.
        low: the lowest; above `high` if there is none.
        levels: how many.
    """
    if low > high:
        return np.empty(0), ()
    if high == low:
        return np.array([low]), (0,)
    tabulated = np.linspace(high, low, levels + 1)
    grid = np.unique(np.concatenate([tabulated, np.linspace(high, low, GRID_POINTS)]))[::-1]
    return grid, tuple(int(np.flatnonzero(grid == level)[0]) for level in tabulated)


def _measure_split(labels: Sequence[str], readings: Sequence[Sequence[Reading]], split: Split) -> list[Measured]:
    """All architectures on all domains together, then on each."""
    domains = readings[0][0].run.split(split)
    if not domains:
        return []
    found = [read_domain(readings, split, number) for number in range(len(domains))]
    documents = [len(domain.documents) for domain in domains]
    measured = _measures(labels, split, ALL_DOMAINS, Together(found), sum(documents))
    for domain, one, number in zip(domains, found, documents, strict=True):
        measured += _measures(labels, split, domain.domain, Together([one]), number)
    return measured


def _measures(labels: Sequence[str], split: Split, domain: str, together: Together, documents: int) -> list[Measured]:
    return [
        Measured(
            architecture=label,
            split=split,
            domain=domain,
            loss=_estimate(together.signs(a), together),
            gap=_estimate(together.signs(a, beside=0), together),
            seed_spread=_spread(together.seeds(a)),
            documents=documents,
            tokens=together.tokens,
        )
        for a, label in enumerate(labels)
    ]


def _estimate(signs: FloatArray, together: Together) -> Estimate:
    """A combination of the architectures' losses with its uncertainty."""
    value, documents = together.value(signs), together.over_documents(signs)
    both = documents + together.over_batches(signs)
    half = both.half_width(CONFIDENCE)
    return Estimate(value, np.sqrt(both.variance), np.sqrt(documents.variance), value - half, value + half)


def _spread(losses: FloatArray) -> FloatArray:
    """[G] standard deviation over seeds of `losses` [seeds, G]; one seed has none."""
    return losses.std(axis=0, ddof=1) if len(losses) > 1 else np.full(losses.shape[1], np.nan)
