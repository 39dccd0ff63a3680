"""Architectures compared at matched training loss, with the uncertainty from the choice of documents and of batches.

A run is read as a curve: training loss on x, evaluation loss on y, one point an evaluation. Between its points the
curve is linear; beyond them it is unknown, so a comparison keeps to the training losses that every run has passed.

Because x is held fixed, the loss at a given x is a fixed weighting of the losses at the evaluations. A bootstrap over
documents (Efron & Tibshirani 1993, chapters 6 and 13) is then two matrix products: resampled document counts times
document losses, times those weights. All runs see the same resamples, so what makes a document hard for all of them
cancels in a difference.

Documents are not all: the batches of a window are few too, and an error of the training loss moves a point along x,
which is as good as moving it along y by the slope of the curve. On short runs that is the larger part. So the batches
of each window are resampled as well, the same ones in all runs of equal seed, which trained on the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from megatron_ext.analysis.architecture import Architecture, group_runs
from megatron_ext.analysis.runs import FloatArray, IntArray, Run, Split

ALL_DOMAINS = "all"
"""Name of the token-weighted mean over a split's domains."""

LONGEST_WINDOW = 20
"""Steps: enough to average out most of a batch's own noise, short beside the change of the loss over a run."""

GRID_POINTS = 48
"""Training losses at which the plotted curves are evaluated between the levels."""

SHORTEST_NOISE_WINDOW = 6
"""Steps: twice what a parabola fits exactly."""

BLOCK_ELEMENTS = 2**22
"""Resampled document counts held at a time (32 MiB)."""

INTERVAL = (2.5, 97.5)
"""Percentiles of the reported 95 % interval."""

RESOLUTION = 0.004
"""Nats a token within which the study calls two losses at equal training loss the same."""

NORMAL_HALF_WIDTH = 1.96
"""Standard errors on each side of a 95 % interval."""

ROUNDING = 1e-9
"""Nats a token; differences below are of the arithmetic, not of documents."""


@dataclass(frozen=True)
class Estimate:
    """A quantity at G training losses, from a paired bootstrap; all [G].

    Attributes:
        value: on the sample as it is.
        error: standard error over documents and training batches.
        document_error: standard error over documents alone.
        low: lower end of the 95 % percentile interval over documents and batches.
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
        if half_width < ROUNDING:
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


def compare(
    runs: Sequence[Run], *, window: int | None = None, levels: int = 5, resamples: int = 1000, seed: int = 0
) -> Comparison:
    """Compare runs over the same data at matched training loss, as far as they have one in common.

    Args:
        runs: from `read_runs`; those that differ in their seed alone are averaged.
        window: steps over which the training loss is averaged; None: `default_window`.
        levels: tabulated training losses, evenly spaced, above the lowest common one.
        resamples: bootstrap resamples of the documents and of the training batches.
        seed: of the resamples.

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
            _Reading(run, x, grid, interpolation_weights(x, grid), training_loss_noise(run, window, resamples, seed))
            for run, x in zip(one.runs, xs, strict=True)
        ]
        for one, xs in zip(architectures, curves, strict=True)
    ]
    labels = [one.label for one in architectures]
    measured: list[Measured] = []
    for split in get_args(Split):
        measured += _measure_split(labels, readings, split, np.random.default_rng(seed), resamples)
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


def bootstrap_counts(documents: int, resamples: int, generator: np.random.Generator) -> IntArray:
    """[resamples, documents] how often each document is drawn when as many are drawn with replacement as there are."""
    draws = generator.integers(0, documents, size=(resamples, documents))
    draws += documents * np.arange(resamples)[:, None]
    return np.bincount(draws.ravel(), minlength=resamples * documents).reshape(resamples, documents)


def estimate(value: FloatArray, over_documents: FloatArray, over_batches: FloatArray) -> Estimate:
    """`value` [G] with its uncertainty, from bootstrap samples [R, G] and what resampled batches add to them [R, G]."""
    samples = over_documents + over_batches
    low, high = np.percentile(samples, INTERVAL, axis=0)
    return Estimate(value, samples.std(axis=0, ddof=1), over_documents.std(axis=0, ddof=1), low, high)


def training_loss_noise(run: Run, window: int, resamples: int, seed: int) -> FloatArray:
    """[R, E] by how much the training loss at each evaluation departs when the window's batches are drawn again.

    What is drawn are the step losses' departures from a parabola through the window, so that learning within the
    window does not count as noise. Draws depend on the run's seed and the step alone: runs that trained on the same
    batches get the same draws. Windows of less than six steps say too little and give zeros.
    """
    noise = np.zeros((resamples, len(run.evaluation_steps)))
    for index, step in enumerate(run.evaluation_steps):
        inside = (run.steps > step - window) & (run.steps <= step)
        count = int(inside.sum())
        if count < SHORTEST_NOISE_WINDOW:
            continue
        at = np.linspace(-1.0, 1.0, count)
        rest = run.losses[inside] - np.polyval(np.polyfit(at, run.losses[inside], 2), at)
        rest *= np.sqrt(count / (count - 3))  # the parabola has taken three degrees of freedom
        counts = bootstrap_counts(count, resamples, np.random.default_rng([seed, run.seed, int(step)]))
        noise[:, index] = counts @ rest / count
    return noise


def curve_slope(x: FloatArray, y: FloatArray, at: FloatArray) -> FloatArray:
    """[G] slope at `at` [G] of y over x [E], by a parabola through all points: neighbours alone would be all noise."""
    degree = min(2, len(np.unique(x)) - 1)
    if degree == 0:
        return np.zeros_like(at)
    centre = x.mean()
    return np.polyval(np.polyder(np.polyfit(x - centre, y, degree)), at - centre)


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


@dataclass(frozen=True)
class _Reading:
    """How a run is read at the training losses of the comparison.

    Attributes:
        run: the run.
        x: [E] its training losses.
        grid: [G] the training losses it is read at.
        weights: [G, E] of its evaluations.
        noise: [R, E] resampled departures of `x`.
    """

    run: Run
    x: FloatArray
    grid: FloatArray
    weights: FloatArray
    noise: FloatArray

    def shift(self, nats: FloatArray) -> FloatArray:
        """[R, G] what the departures of x do to `nats` [E] when it is read at the grid."""
        return -curve_slope(self.x, nats, self.grid) * (self.noise @ self.weights.T)


@dataclass(frozen=True)
class _Sums:
    """Sums over documents, on the sample as it is and on R resamples of it, for A architectures at G losses.

    Attributes:
        seeds: for each architecture [runs, G]: nats of each seed.
        tokens: scored.
        sampled_losses: [R, A, G] nats of each resample of the documents, mean over seeds.
        sampled_tokens: [R] tokens of each resample of the documents.
        shifts: [R, A, G] nats that each resample of the batches adds, mean over seeds.
    """

    seeds: tuple[FloatArray, ...]
    tokens: float
    sampled_losses: FloatArray
    sampled_tokens: FloatArray
    shifts: FloatArray

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            tuple(a + b for a, b in zip(self.seeds, other.seeds, strict=True)),
            self.tokens + other.tokens,
            self.sampled_losses + other.sampled_losses,
            self.sampled_tokens + other.sampled_tokens,
            self.shifts + other.shifts,
        )


def _measure_split(
    labels: Sequence[str],
    readings: Sequence[Sequence[_Reading]],
    split: Split,
    generator: np.random.Generator,
    resamples: int,
) -> list[Measured]:
    """All architectures on all domains together, then on each; the resample of a domain is the same for all runs."""
    domains = readings[0][0].run.split(split)
    measured: list[Measured] = []
    total: _Sums | None = None
    for index, domain in enumerate(domains):
        losses = [[one.run.split(split)[index].losses for one in runs] for runs in readings]
        sums = _domain_sums(losses, readings, domain.tokens, generator, resamples)
        total = sums if total is None else total + sums
        measured += _measures(labels, split, domain.domain, sums, len(domain.documents))
    if total is None:
        return []
    documents = sum(len(domain.documents) for domain in domains)
    return _measures(labels, split, ALL_DOMAINS, total, documents) + measured


def _domain_sums(
    losses: Sequence[Sequence[FloatArray]],
    readings: Sequence[Sequence[_Reading]],
    tokens: IntArray,
    generator: np.random.Generator,
    resamples: int,
) -> _Sums:
    """Sums over one domain's D documents, from the losses [E, D] of every run of every architecture."""
    pairs = [list(zip(many, runs, strict=True)) for many, runs in zip(losses, readings, strict=True)]
    seeds = tuple(np.stack([one.weights @ loss.sum(axis=1) for loss, one in runs]) for runs in pairs)
    shifts = [np.mean([one.shift(loss.sum(axis=1)) for loss, one in runs], axis=0) for runs in pairs]
    block = max(1, BLOCK_ELEMENTS // len(tokens))
    sampled_losses, sampled_tokens = [], []
    for start in range(0, resamples, block):
        drawn = bootstrap_counts(len(tokens), min(block, resamples - start), generator).astype(np.float64)
        means = [np.mean([drawn @ loss.T @ one.weights.T for loss, one in runs], axis=0) for runs in pairs]
        sampled_losses.append(np.stack(means, axis=1))
        sampled_tokens.append(drawn @ tokens)
    return _Sums(
        seeds=seeds,
        tokens=float(tokens.sum()),
        sampled_losses=np.concatenate(sampled_losses),
        sampled_tokens=np.concatenate(sampled_tokens),
        shifts=np.stack(shifts, axis=1),
    )


def _measures(labels: Sequence[str], split: Split, domain: str, sums: _Sums, documents: int) -> list[Measured]:
    values = [one.mean(axis=0) / sums.tokens for one in sums.seeds]
    samples = sums.sampled_losses / sums.sampled_tokens[:, None, None]
    shifts = sums.shifts / sums.tokens
    return [
        Measured(
            architecture=label,
            split=split,
            domain=domain,
            loss=estimate(values[a], samples[:, a], shifts[:, a]),
            gap=estimate(values[a] - values[0], samples[:, a] - samples[:, 0], shifts[:, a] - shifts[:, 0]),
            seed_spread=_spread(sums.seeds[a] / sums.tokens),
            documents=documents,
            tokens=int(sums.tokens),
        )
        for a, label in enumerate(labels)
    ]


def _spread(losses: FloatArray) -> FloatArray:
    """[G] standard deviation over seeds of `losses` [seeds, G]; one seed has none."""
    return losses.std(axis=0, ddof=1) if len(losses) > 1 else np.full(losses.shape[1], np.nan)
