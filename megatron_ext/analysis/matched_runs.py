"""Runs as they enter a comparison: the loss to match at each evaluation, and the pooled documents of domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from megatron_ext.analysis.errors import ErrorSource, Key
from megatron_ext.analysis.run_files import FloatArray, IntArray, Split
from megatron_ext.analysis.runs import Run
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.ratio_interval import MIN_DOCUMENTS, ratio_deviations

Match = Literal["training", "validation"]
"""Loss at which runs are compared: the training loss, or the loss on held-out documents of the training domains."""

MAX_WINDOW = 20
"""Maximum averaging window in steps: long enough to average out most of the noise of single batches, and so short that
the loss changes little."""

MIN_NOISE_WINDOW = 6
"""Minimum number of steps for an estimate of batch noise: twice the three that a parabola fits exactly."""


@dataclass(frozen=True)
class DomainSet:
    """Domains of a split whose documents are pooled.

    Attributes:
        split: the split.
        indices: indices of the domains in `Run.split(split)`.
        tokens: [D], tokens of each document of all domains.
        strata: indices of the documents of each stratum.
    """

    split: Split
    indices: tuple[int, ...]
    tokens: IntArray
    strata: tuple[IntArray, ...]

    def losses(self, run: Run) -> FloatArray:
        """Return the summed losses [E, D] of a run on each document in nats."""
        domains = run.split(self.split)
        return np.concatenate([domains[index].losses for index in self.indices], axis=1)

    def document_errors(self, nats_gd: FloatArray, kind: str) -> dict[Key, ErrorSource]:
        """Return the errors of sum(nats) / sum(tokens) over the documents of each domain, with fixed token shares."""
        sources: dict[Key, ErrorSource] = {}
        total = float(self.tokens.sum())
        for number, stratum in enumerate(self.strata):
            tokens = self.tokens[stratum]
            contributions, degrees = ratio_deviations(nats_gd[:, stratum], tokens)
            sources[(kind, self.split, number)] = ErrorSource(contributions * (tokens.sum() / total), degrees)
        return sources


@dataclass(frozen=True)
class MatchedRun:
    """Run with the loss at which it is compared.

    Attributes:
        run: the run.
        x: [E], loss to match at each evaluation: training loss or in-domain validation loss, in nats per token.
        noise: step losses [S] in the window of each evaluation without their trend; None if `x` is no training loss or
            the window has fewer than six steps.
        matched_documents: documents of the validation loss, if `x` is that.
    """

    run: Run
    x: FloatArray
    noise: tuple[FloatArray | None, ...]
    matched_documents: DomainSet | None = None


def domain_set(run: Run, split: Split, indices: Sequence[int]) -> DomainSet:
    """Pool domains of a split, given by their indices. All runs of a comparison have the same documents."""
    domains = [run.split(split)[index] for index in indices]
    tokens = np.concatenate([domain.tokens for domain in domains])
    return DomainSet(split, tuple(indices), tokens, strata(tokens, [len(domain.tokens) for domain in domains]))


def strata(tokens: IntArray, documents: Sequence[int]) -> tuple[IntArray, ...]:
    """Return the indices of the documents of each stratum.

    Args:
        tokens: [D], tokens of each document of all domains; documents without tokens do not count.
        documents: number of documents of each domain.
    """
    starts = np.cumsum([0, *documents])
    indices = [np.arange(start, end) for start, end in pairwise(starts)]
    counts = [int((tokens[domain] > 0).sum()) for domain in indices]
    return tuple(np.concatenate([indices[index] for index in stratum]) for stratum in _strata(counts))


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


def default_window(runs: Sequence[Run]) -> int:
    """Return the averaging window of the training loss: the shortest evaluation interval of any run, at most 20 steps.

    The last interval of a run does not count: the last step is always evaluated, however near the one before.

    The loss of a single step is noisy: the noise of one batch would move a point along x by more than the gaps of
    interest. With the same window in all runs, averaging delays all curves equally.
    """
    intervals = [np.diff(run.evaluation_steps, prepend=0) for run in runs]
    shortest = min(int((steps[:-1] if len(steps) > 2 else steps).min()) for steps in intervals)
    return min(shortest, MAX_WINDOW)


def training_loss(run: Run, window: int) -> FloatArray:
    """Return the training loss [E] at each evaluation in nats per token: the mean over the last `window` steps."""
    ends = np.searchsorted(run.steps, run.evaluation_steps, side="right")
    starts = np.searchsorted(run.steps, run.evaluation_steps - window, side="right")
    sums = np.concatenate([[0.0], np.cumsum(run.losses)])
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_to_match(run: Run, match: Match, window: int) -> FloatArray:
    """Return the loss [E] to match at each evaluation in nats per token.

    Raises:
        UserError: the validation loss is to be matched, and the run has none.
    """
    if match == "training":
        return training_loss(run, window)
    if not run.split("validation"):
        problem = "has no in-domain (split validation) evaluation to match"
        raise UserError(str(run.path), problem, "give --match training")
    return run.split_loss("validation")


def matched_run(run: Run, match: Match, window: int) -> MatchedRun:
    """Build the run of a comparison.

    Raises:
        UserError: as in `loss_to_match`.
    """
    x = loss_to_match(run, match, window)
    if match == "training":
        return MatchedRun(run, x, batch_noise(run, window))
    return MatchedRun(run, x, (None,) * len(x), domain_set(run, "validation", range(len(run.split("validation")))))


def batch_noise(run: Run, window: int) -> tuple[FloatArray | None, ...]:
    """Return the noise of the step losses in the window of each evaluation.

    The noise is the residual from a parabola fitted to the window, so that the trend of the loss does not count.

    Returns:
        For each evaluation the residuals [S]; None for a window of fewer than six steps.
    """
    return tuple(_window_residuals(run, window, int(step)) for step in run.evaluation_steps)


def _window_residuals(run: Run, window: int, step: int) -> FloatArray | None:
    in_window = (run.steps > step - window) & (run.steps <= step)
    losses = run.losses[in_window]
    if len(losses) < MIN_NOISE_WINDOW:
        return None
    time = np.linspace(-1.0, 1.0, len(losses))
    return np.asarray(losses - np.polyval(np.polyfit(time, losses, 2), time))
