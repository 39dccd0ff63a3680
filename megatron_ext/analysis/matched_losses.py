"""Losses of an architecture at matched loss, with their errors by source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.errors import BORROWED, Errors, ErrorSource, Key
from megatron_ext.analysis.interpolation import (
    MIN_EVALUATIONS,
    left_out_residuals,
    local_slope,
    monotone_weights,
    neighbouring_residuals,
)
from megatron_ext.analysis.matched_runs import DomainSet, MatchedRun
from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.utils.ratio_interval import SamplingVariance

PARABOLA_PARAMETERS = 3
"""Number of constants of a parabola, by which a fit reduces the degrees of freedom of its residuals."""

RESIDUALS_PER_DEGREE = 2
"""Number of neighbouring residuals for one degree of freedom. Neighbouring residuals share points: for evenly spaced
points and independent errors, the correlations -0.7 and 0.2 of the first two neighbours leave about half of them."""


@dataclass(frozen=True)
class MatchedLoss:
    """Loss of an architecture on a set of domains at G matched losses; NaN where a run was not evaluated.

    Attributes:
        seeds: training.seed of each run.
        by_seed: [seeds, G], loss of each run in nats per token.
        documents: errors of the mean over seeds from the choice of documents.
        curve: errors of that mean from the curves between evaluations.
        folder: folder of the first run.
    """

    seeds: tuple[int, ...]
    by_seed: FloatArray
    documents: Errors
    curve: Errors
    folder: str

    @property
    def value(self) -> FloatArray:
        """Mean [G] over seeds."""
        return np.asarray(self.by_seed.mean(axis=0))

    def errors(self, other_seeds: SamplingVariance | None) -> Errors:
        """Return the errors of the mean over seeds.

        The spread over seeds contains the errors of the curves. If it is unknown, these are included without it.

        Args:
            other_seeds: variance of a single run over seeds, from other architectures; None if unknown. It is used for
                an architecture with a single seed.
        """
        seeds = self._seed_errors(other_seeds)
        return Errors({**self.documents.sources, **(seeds or self.curve.sources)}, self.documents.points)

    def _seed_errors(self, other_seeds: SamplingVariance | None) -> dict[Key, ErrorSource]:
        """Return the errors from the choice of seeds; empty if their spread is unknown.

        Architectures with the same seeds are compared seed by seed.
        """
        number = len(self.seeds)
        if number > 1:
            deviations = (self.by_seed - self.value)[np.argsort(self.seeds)].T  # [G, seeds]
            return {
                ("seeds", *sorted(self.seeds)): ErrorSource(deviations / np.sqrt(number * (number - 1)), number - 1)
            }
        if other_seeds is None:
            return {}
        # The run is a single draw. No other estimate shares its error, so its key contains the folder.
        degrees = float(other_seeds.degrees_of_freedom[0])
        return {("seeds", BORROWED, self.folder): ErrorSource(np.sqrt(other_seeds.variance)[:, None], degrees)}


def matched_loss(runs: Sequence[MatchedRun], domains: DomainSet, grid: FloatArray) -> MatchedLoss:
    """Interpolate the loss of an architecture's runs at the matched losses `grid` [G].

    Args:
        runs: runs of the architecture, one for each seed.
        domains: pooled domains.
        grid: matched losses.
    """
    tokens = float(domains.tokens.sum())
    by_seed, nats_gd = [], np.zeros((len(grid), len(domains.tokens)))
    curve: dict[Key, ErrorSource] = {}
    matched_documents = runs[0].matched_documents
    shifts_gd = np.zeros((len(grid), 0 if matched_documents is None else len(matched_documents.tokens)))
    for run in runs:
        losses = domains.losses(run.run)
        pooled = losses.sum(axis=1) / tokens
        weights, slope = monotone_weights(run.x, pooled, grid), local_slope(run.x, pooled, grid)
        by_seed.append(weights @ pooled)
        nats_gd += weights @ losses / len(runs)
        curve |= _curve_errors(run, pooled, weights, slope, len(runs))
        if matched_documents is not None:
            shifts_gd -= slope[:, None] * (weights @ matched_documents.losses(run.run)) / len(runs)
    documents = domains.document_errors(nats_gd, "documents")
    if matched_documents is not None:
        documents |= matched_documents.document_errors(shifts_gd, "matched documents")
    points = len(grid)
    seeds = tuple(run.run.seed for run in runs)
    return MatchedLoss(
        seeds, np.stack(by_seed), Errors(documents, points), Errors(curve, points), str(runs[0].run.path)
    )


def _curve_errors(
    run: MatchedRun, pooled: FloatArray, weights: FloatArray, slope: FloatArray, num_seeds: int
) -> dict[Key, ErrorSource]:
    """Return the errors of a run's curve between evaluations: checkpoints, training batches and interpolation.

    With enough evaluations, the errors are the residuals of evaluations that are left out. Otherwise they are those of
    the training loss alone, from the scatter of the batches in its window: an error of the training loss moves a point
    along x, which has the effect of a shift along y by the error times the slope. Runs of one seed that were evaluated
    at the same steps have the same batches, so that common errors cancel in a difference.
    """
    key = run.run.seed, tuple(map(int, run.run.evaluation_steps))
    if len(pooled) >= MIN_EVALUATIONS:
        nearest = neighbouring_residuals(left_out_residuals(run.x, pooled))  # [E, K]
        number = nearest.shape[1]
        products = weights[:, :, None] * nearest / (np.sqrt(number) * num_seeds)
        contributions = products.reshape(len(weights), nearest.size)
        return {("curve", *key): ErrorSource(contributions, number / RESIDUALS_PER_DEGREE)}
    sources: dict[Key, ErrorSource] = {}
    for index, noise in enumerate(run.noise):
        if noise is not None:
            degrees = len(noise) - PARABOLA_PARAMETERS
            shift = -(slope * weights[:, index])[:, None] / num_seeds
            contributions = shift * noise / np.sqrt(degrees * len(noise))
            step = int(run.run.evaluation_steps[index])
            sources[("batches", run.run.seed, step, len(noise))] = ErrorSource(contributions, degrees)
    return sources


def pooled_seed_variance(losses: Sequence[FloatArray]) -> SamplingVariance | None:
    """Return the variance [G] of a single run over seeds, pooled over architectures; None without a second seed.

    Args:
        losses: losses [seeds, G] of each architecture, NaN where a run was not evaluated. Points without a known
            variance get that of the nearest point.
    """
    several = [by_seed for by_seed in losses if len(by_seed) > 1]
    if not several:
        return None
    degrees = sum((len(by_seed) - 1) * ~np.isnan(by_seed.mean(axis=0)) for by_seed in several)
    squares = sum(np.nan_to_num(((by_seed - by_seed.mean(axis=0)) ** 2).sum(axis=0)) for by_seed in several)
    known = np.flatnonzero(degrees)
    if not len(known):
        return None
    points = np.arange(len(degrees))
    nearest = known[np.abs(known - points[:, None]).argmin(axis=1)]
    lowest = float(degrees[known].min())
    return SamplingVariance(squares[nearest] / degrees[nearest], np.full(len(points), lowest))
