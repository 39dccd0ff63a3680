"""Spread of losses and gaps at matched training loss over evaluated documents and training batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.run_files import FloatArray, IntArray, Split
from megatron_ext.analysis.runs import Run
from megatron_ext.utils.ratio_interval import MIN_DOCUMENTS, SamplingVariance, ratio_variance, zero_variance_like

MIN_NOISE_WINDOW = 6
"""Minimum number of steps for an estimate of batch noise: twice the three that a parabola fits exactly."""

PARABOLA_PARAMETERS = 3
"""Number of constants of a parabola, by which a fit reduces the degrees of freedom of its residuals."""


def batch_noise(run: Run, window: int) -> tuple[FloatArray | None, ...]:
    """Return the noise of the step losses in the window of each evaluation.

    The noise is the residual from a parabola fitted to the window, so that the trend of the loss does not count.

    Returns:
        For each evaluation the residuals [S]; None for a window of fewer than six steps.
    """
    return tuple(_residuals(run, window, int(step)) for step in run.evaluation_steps)


def _residuals(run: Run, window: int, step: int) -> FloatArray | None:
    in_window = (run.steps > step - window) & (run.steps <= step)
    losses = run.losses[in_window]
    if len(losses) < MIN_NOISE_WINDOW:
        return None
    time = np.linspace(-1.0, 1.0, len(losses))
    return np.asarray(losses - np.polyval(np.polyfit(time, losses, 2), time))


def curve_slope(x: FloatArray, y: FloatArray, at: FloatArray) -> FloatArray:
    """Return the slope [G] at `at` [G] of a parabola that is fitted to the points x [E], y [E].

    A slope from neighbouring points alone would be dominated by noise.
    """
    degree = min(2, len(np.unique(x)) - 1)
    if degree == 0:
        return np.zeros_like(at)
    centre = x.mean()
    return np.polyval(np.polyder(np.polyfit(x - centre, y, degree)), at - centre)


@dataclass(frozen=True)
class InterpolatedRun:
    """Interpolation of a run at the training losses of the comparison.

    Attributes:
        run: the run.
        x: [E], training losses of the evaluations.
        grid: [G], training losses of the comparison.
        weights: [G, E], interpolation weights of the evaluations.
        noise: noise of each evaluation's training loss, from `batch_noise`.
    """

    run: Run
    x: FloatArray
    grid: FloatArray
    weights: FloatArray
    noise: tuple[FloatArray | None, ...]

    def shifts(self, nats: FloatArray) -> FloatArray:
        """Return the derivative [G, E] of `nats` [E], interpolated at the grid, with respect to each training loss."""
        return -curve_slope(self.x, nats, self.grid)[:, None] * self.weights


@dataclass(frozen=True)
class DomainLosses:
    """Losses of all runs of A architectures on one domain of D documents, at G training losses.

    Attributes:
        tokens: [D], tokens of each document.
        nats: losses of the documents, [G, D], by architecture and run.
        shifts: derivatives with respect to the training losses, [G, E], by architecture and run, from
            `InterpolatedRun.shifts`.
        interpolated: interpolated runs by architecture.
    """

    tokens: IntArray
    nats: Sequence[Sequence[FloatArray]]
    shifts: Sequence[Sequence[FloatArray]]
    interpolated: Sequence[Sequence[InterpolatedRun]]

    def difference(self, signs: FloatArray) -> FloatArray:
        """Return the sum [G, D] of the documents' losses over architectures with `signs` [A], averaged over seeds."""
        terms = [sign * np.mean(nats, axis=0) for sign, nats in zip(signs, self.nats, strict=True) if sign]
        return np.asarray(sum(terms)) if terms else np.zeros_like(self.nats[0][0])


def interpolate_domain(interpolated: Sequence[Sequence[InterpolatedRun]], split: Split, index: int) -> DomainLosses:
    """Interpolate all runs on a domain of a split, given by its index."""
    nats, shifts = [], []
    for runs in interpolated:
        losses = [run.run.split(split)[index].losses for run in runs]  # [E, D] each
        nats.append([run.weights @ loss for run, loss in zip(runs, losses, strict=True)])
        shifts.append([run.shifts(loss.sum(axis=1)) for run, loss in zip(runs, losses, strict=True)])
    return DomainLosses(interpolated[0][0].run.split(split)[index].tokens, nats, shifts, interpolated)


class PooledDomains:
    """Token-weighted mean loss over several domains, at G training losses."""

    def __init__(self, domains: Sequence[DomainLosses]) -> None:
        self._domains = domains
        self.tokens = int(sum(domain.tokens.sum() for domain in domains))

    def signs(self, architecture: int, baseline: int | None = None) -> FloatArray:
        """Return the signs [A] of an architecture's loss, or of its difference to architecture `baseline`."""
        signs = np.zeros(len(self._domains[0].nats))
        signs[architecture] += 1
        if baseline is not None:
            signs[baseline] -= 1
        return signs

    def seeds(self, architecture: int) -> FloatArray:
        """Return the losses [seeds, G] of an architecture's runs."""
        sums = [[nats.sum(axis=1) for nats in domain.nats[architecture]] for domain in self._domains]
        return np.asarray(np.sum(sums, axis=0)) / self.tokens

    def value(self, signs: FloatArray) -> FloatArray:
        """Return the signed sum [G] of the architectures' losses."""
        return np.asarray(sum(domain.difference(signs).sum(axis=1) for domain in self._domains)) / self.tokens

    def over_documents(self, signs: FloatArray) -> SamplingVariance:
        """Return the spread [G] over the choice of documents within each domain, with fixed token shares of domains."""
        nats = [domain.difference(signs) for domain in self._domains]
        if not signs.any():
            return zero_variance_like(np.zeros(len(nats[0])))
        spread: SamplingVariance | None = None
        for stratum in _strata([len(domain.tokens) for domain in self._domains]):
            tokens = np.concatenate([self._domains[index].tokens for index in stratum])
            ratio_spread = ratio_variance(np.concatenate([nats[index] for index in stratum], axis=1), tokens)
            stratum_spread = ratio_spread.scaled(float(tokens.sum()) / self.tokens)
            spread = stratum_spread if spread is None else spread + stratum_spread
        assert spread is not None  # there is a domain
        return spread

    def over_batches(self, signs: FloatArray) -> SamplingVariance:
        """Return the spread [G] over the choice of the batches in the windows of the training losses.

        Runs with the same seed have the same batches at the same steps, so that common noise cancels in a difference.
        """
        interpolated = self._domains[0].interpolated
        spread = zero_variance_like(np.zeros(len(interpolated[0][0].grid)))
        if not signs.any():
            return spread
        windows: dict[tuple[int, int, int], list[FloatArray]] = defaultdict(list)
        for architecture, sign in enumerate(signs):
            for seed_index, run in enumerate(interpolated[architecture] if sign else ()):
                shift = (
                    np.sum([domain.shifts[architecture][seed_index] for domain in self._domains], axis=0) / self.tokens
                )
                factor = sign / len(interpolated[architecture])
                for index, noise in _known_noise(run):
                    key = run.run.seed, int(run.run.evaluation_steps[index]), len(noise)
                    windows[key].append(factor * shift[:, index, None] * noise)  # [G, S]
        for (_seed, _step, steps), terms in windows.items():
            noise = np.sum(terms, axis=0)
            degrees_of_freedom = steps - PARABOLA_PARAMETERS
            variance = (noise**2).sum(axis=1) / degrees_of_freedom / steps
            spread = spread + SamplingVariance(variance, np.full_like(variance, degrees_of_freedom))
        return spread


def _known_noise(run: InterpolatedRun) -> Iterator[tuple[int, FloatArray]]:
    return ((index, noise) for index, noise in enumerate(run.noise) if noise is not None)


def _strata(documents: Sequence[int]) -> list[list[int]]:
    """Return the indices of the domains of each stratum, given the number of documents of each domain.

    Domains with too few documents for a variance are merged into one stratum. If the stratum still has too few
    documents, the smallest other domains are added. Domains differ more than documents of one domain, so the spread
    tends to be too large (collapsed strata, Cochran 1977, Sampling Techniques, section 5A.12).
    """
    order = sorted(range(len(documents)), key=lambda index: documents[index])
    small = [index for index in order if documents[index] < MIN_DOCUMENTS]
    others = [index for index in order if documents[index] >= MIN_DOCUMENTS]
    while small and others and sum(documents[index] for index in small) < MIN_DOCUMENTS:
        small.append(others.pop(0))
    return ([small] if small else []) + [[index] for index in others]
