"""Gaps to the baseline by class of token at matched loss: whether a gap is recall from the context or knowledge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.analysis.architecture import Architecture
from megatron_ext.analysis.cells import NOTHING, Cell, Table, number, text
from megatron_ext.analysis.matched import Comparison, Estimate, estimate
from megatron_ext.analysis.matched_losses import matched_loss, pooled_seed_variance
from megatron_ext.analysis.matched_runs import DomainSet, matched_run, strata
from megatron_ext.analysis.matched_tables import gap_cell
from megatron_ext.analysis.run_files import SPLITS, FloatArray, IntArray, Split
from megatron_ext.analysis.runs import Run
from megatron_ext.analysis.token_classes import ClassLosses, read_class_losses
from megatron_ext.utils.errors import UserError

EVERY = "every"
"""Value of training.evaluate_classes with which every evaluation records losses by class."""


@dataclass(frozen=True)
class ClassGap:
    """Gap of an architecture to its baseline on the tokens of one class of a split, at the architecture's headline.

    Attributes:
        name: name of the class, `group/class`.
        share: share of the split's tokens that have the class.
        baseline_loss: loss of the baseline in nats per token.
        gap: loss minus that of the baseline, at one matched loss.
    """

    name: str
    share: float
    baseline_loss: float
    gap: Estimate


@dataclass(frozen=True)
class _ClassSet(DomainSet):
    """Tokens of one class in the documents of a split, with their summed losses [E, D] by run folder."""

    nats: Mapping[Path, FloatArray]

    def losses(self, run: Run) -> FloatArray:
        """Return the summed losses [E, D] of a run on the tokens of the class."""
        return self.nats[run.path]


def class_gaps(
    comparison: Comparison, split: Split, losses_of: Mapping[Path, Sequence[ClassLosses]]
) -> dict[str, list[ClassGap]]:
    """Return the gaps by class of each architecture, by its label, in the order of the recorded classes.

    Args:
        comparison: comparison of runs.
        split: `test` or `validation`.
        losses_of: recorded losses from `read_losses`, by run folder.

    Returns:
        Empty unless every evaluation of every compared run has losses by class of the same tokens, which
        `training.evaluate_classes=every` records.

    Raises:
        UserError: the recorded losses of a run are invalid, or not about the documents of its evaluations.
    """
    labels = [measured.architecture for measured in comparison.compared("test")]
    if not labels or not comparison.baseline.runs[0].split(split) or split == comparison.match:
        return {}  # the validation loss itself is matched
    architectures = compared_architectures(comparison)
    recorded = {run.path: _recorded(run, split, losses_of) for group in architectures for run in group.runs}
    names = _names(list(recorded.values()))
    matched_runs = {
        group.label: [matched_run(run, comparison.match, comparison.window) for run in group.runs]
        for group in architectures
    }
    grid = np.unique([comparison.matched_losses[comparison.headlines[label]] for label in labels])[::-1]
    num_tokens = sum(int(domain.tokens.sum()) for domain in comparison.baseline.runs[0].split(split))
    gaps: dict[str, list[ClassGap]] = {label: [] for label in labels}
    for name in names:
        domains = _class_set(comparison.baseline.runs[0], split, name, recorded)
        if domains is None:
            continue
        losses = {label: matched_loss(runs, domains, grid) for label, runs in matched_runs.items()}
        other_seeds = pooled_seed_variance([loss.by_seed for loss in losses.values()])
        for measured in comparison.compared("test"):
            loss, baseline = losses[measured.architecture], losses[measured.baseline]
            at = int(np.flatnonzero(grid == comparison.matched_losses[comparison.headlines[measured.architecture]])[0])
            errors = loss.errors(other_seeds).at(at) - baseline.errors(other_seeds).at(at)
            gap = estimate((loss.value - baseline.value)[at : at + 1], errors)
            share = float(domains.tokens.sum()) / num_tokens
            gaps[measured.architecture].append(ClassGap(name, share, float(baseline.value[at]), gap))
    return gaps if any(gaps.values()) else {}


def compared_architectures(comparison: Comparison) -> list[Architecture]:
    """Return the architectures that are compared at matched loss, and their baselines."""
    labels = {label for one in comparison.compared("test") for label in (one.architecture, one.baseline)}
    return [architecture for architecture in comparison.architectures if architecture.label in labels]


def read_losses(comparison: Comparison) -> dict[Path, list[ClassLosses]]:
    """Read the losses by class of the compared runs, by run folder.

    Returns:
        Empty if a run was not trained to record them at every evaluation: there is nothing to compare then.
    """
    runs = [run for architecture in compared_architectures(comparison) for run in architecture.runs]
    if any(run.config["training"].get("evaluate_classes") != EVERY for run in runs):
        return {}
    return {run.path: read_class_losses(run.path) for run in runs}


def _recorded(
    run: Run, split: Split, losses_of: Mapping[Path, Sequence[ClassLosses]]
) -> list[list[ClassLosses]] | None:
    """Return the recorded losses of a run by evaluation and domain; None if an evaluation lacks them."""
    recorded = losses_of.get(run.path, ())
    found = {(losses.step, losses.domain): losses for losses in recorded if losses.split == split}
    evaluations = []
    for step in map(int, run.evaluation_steps):
        domains = [found.get((step, domain.domain)) for domain in run.split(split)]
        known = [losses for losses in domains if losses is not None]
        if len(known) < len(domains):
            return None
        for losses, domain in zip(known, run.split(split), strict=True):
            if not np.array_equal(losses.documents, domain.documents):
                where, hint = str(run.path), "restore evaluation.jsonl"
                raise UserError(where, f"classes of {domain.domain} at step {step} are of other documents", hint)
        evaluations.append(known)
    return evaluations


def _names(recorded: Sequence[list[list[ClassLosses]] | None]) -> list[str]:
    """Return the classes of any evaluation; empty if a run lacks them. A domain without tokens of a class omits it."""
    names: dict[str, None] = {}
    for evaluations in recorded:
        if evaluations is None:
            return []
        for losses in (losses for domains in evaluations for losses in domains):
            names |= dict.fromkeys(losses.names)
    return list(names)


def _class_set(
    run: Run, split: Split, name: str, recorded: Mapping[Path, list[list[ClassLosses]] | None]
) -> _ClassSet | None:
    """Return the tokens of a class with all runs' losses; None if runs disagree about them or there are none."""
    tokens: IntArray | None = None
    nats: dict[Path, FloatArray] = {}
    for path, evaluations in recorded.items():
        rows = []
        for domains in evaluations or ():
            counted = np.concatenate([losses.of(name)[0] for losses in domains])
            if tokens is not None and not np.array_equal(tokens, counted):
                return None
            tokens = counted
            rows.append(np.concatenate([losses.of(name)[1] for losses in domains]))
        nats[path] = np.array(rows)
    if tokens is None or not tokens.any():
        return None
    documents = [len(domain.documents) for domain in run.split(split)]
    return _ClassSet(split, tuple(range(len(documents))), tokens, strata(tokens, documents), nats)


def class_tables(comparison: Comparison) -> dict[Split, Table]:
    """Return the tables of gaps by class out of domain (`test`) and in domain (`validation`).

    Raises:
        UserError: as in `class_gaps`.
    """
    losses_of = read_losses(comparison)
    splits: tuple[Split, ...] = ("test", "validation")
    return {split: _table(class_gaps(comparison, split, losses_of), split) for split in splits}


def _table(gaps: Mapping[str, Sequence[ClassGap]], split: Split) -> Table:
    """Return a table with a row per class and a column per architecture."""
    labels = list(gaps)
    by_name = {label: {gap.name: gap for gap in found} for label, found in gaps.items()}
    rows = []
    for name in dict.fromkeys(gap.name for found in gaps.values() for gap in found):
        known = [by_name[label].get(name) for label in labels]
        first = next(gap for gap in known if gap is not None)
        cells = [NOTHING if gap is None else gap_cell(gap.gap, 0) for gap in known]
        share = Cell(f"{100 * first.share:.1f}\u00a0%", first.share)
        rows.append([text(name), share, number(first.baseline_loss), *cells])
    caption = (
        f"Gaps to the baseline {SPLITS[split]} by class of token, each architecture at its headline, with 95\u00a0% "
        "intervals of single gaps; the loss is that of the first architecture's baseline; nats per token"
    )
    return Table(
        caption, ["class of token", "share of tokens", "loss of the baseline", *labels], rows, notes_below=True
    )
