"""Figures of training loss and of loss by domain over training tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatron_ext.analysis.architecture import Architecture
from megatron_ext.analysis.decisions import ACTIONS, Decision, RunDecisions
from megatron_ext.analysis.run_files import SPLITS, FloatArray, IntArray, Split, column_name
from megatron_ext.analysis.runs import Run
from megatron_ext.analysis.style import (
    MAX_LEGEND,
    Picture,
    Styles,
    Theme,
    as_csv,
    count_axis,
    legend_above,
    new_figure,
    png,
    style_axes,
    styles,
)

TRAINING_COLUMNS = ("run", "architecture", "seed", "step", "tokens", "training_loss")
DECISION_COLUMNS = ("run", "architecture", "seed", "time", "step", "tokens", "done", "why")
DOMAIN_COLUMNS = ("run", "architecture", "seed", "split", "domain", "step", "tokens", "loss")

FLATTENING_START = 0.1
"""Fraction of a run's tokens whose losses do not affect the range of losses in a panel of a domain."""

HIDDEN_START = 0.02
"""Initial fraction of a run's tokens that is not drawn. Its steep fall would flatten the rest of the curve."""

MAX_POINTS = 400
"""Maximum points of a training curve; more would not be visible."""

MAX_WINDOW = 100
"""Maximum number of steps that a point of a training curve averages over."""
WINDOW = 0.1
"""Averaging window as a fraction of the steps so far. Such a window has a constant width on a logarithmic axis."""

MAX_PANEL_COLUMNS = 3


def training_curves(architectures: Sequence[Architecture], run_decisions: Sequence[RunDecisions] = ()) -> Picture:
    """Build the figure of every run's training loss over tokens, averaged as in `smooth_training_loss`.

    Args:
        architectures: architectures, the baseline first.
        run_decisions: decisions about failed steps, which are marked with ticks.
    """
    decisions = {entry.run.path: entry.decisions for entry in run_decisions}
    rows = []
    for architecture, run in _runs(architectures):
        points = zip(*smooth_training_loss(run), strict=True)
        rows += [
            (run.name, architecture.label, run.seed, int(step), int(tokens), float(loss))
            for step, tokens, loss in points
        ]

    def draw(theme: Theme, stacked: bool) -> bytes:
        figure = new_figure((4.6, 4.8) if stacked else (10.0, 4.8), theme)
        ax = figure.subplots()
        style_axes(ax, theme)
        line_styles = styles(architectures, theme)
        widths = _line_widths(architectures)
        for architecture, run in _runs(architectures):
            style = line_styles.by_label[architecture.label]
            _steps, tokens, losses = smooth_training_loss(run)
            ax.plot(tokens, losses, style.line, color=style.color, linewidth=widths[architecture.label], alpha=0.9)
            ax.plot(tokens[-1], losses[-1], style.marker, color=style.color, markersize=5)
            marks = _tokens_at(run, decisions.get(run.path, ()))
            marks = marks[marks >= tokens[0]]
            ax.plot(marks, np.interp(marks, tokens, losses), "|", color=style.color, markersize=11, markeredgewidth=1.4)
        ax.set_ylabel("training loss (nats per token)", fontsize=9.5, color=theme.ink)
        _token_axis(ax, theme)
        legend_above(figure, line_styles.legend, theme, narrow=stacked)
        return png(figure)

    alt = "Training loss over training tokens, one line per run"
    tables = {"training_loss.csv": as_csv(TRAINING_COLUMNS, rows)}
    if any(decisions.values()):
        alt += f"; an upright tick at each faulty step: {_count_marks(run_decisions)}"
        tables["training_loss_decisions.csv"] = as_csv(DECISION_COLUMNS, _decision_rows(architectures, decisions))
    return Picture("training_loss", alt, tables, draw)


def _tokens_at(run: Run, decisions: Sequence[Decision]) -> FloatArray:
    """Return the training tokens [M] at the steps of decisions; for a skipped step, the tokens at the previous step."""
    steps = np.array([decision.step for decision in decisions], dtype=np.int64)
    indices = np.searchsorted(run.steps, steps, side="right")
    return np.concatenate([[0], run.tokens])[indices].astype(np.float64)


def _decision_rows(
    architectures: Sequence[Architecture], decisions: Mapping[Path, Sequence[Decision]]
) -> Iterator[tuple[Any, ...]]:
    for architecture, run in _runs(architectures):
        run_decisions = decisions.get(run.path, ())
        for decision, tokens in zip(run_decisions, _tokens_at(run, run_decisions), strict=True):
            names = (run.name, architecture.label, run.seed)
            yield (*names, decision.time, decision.step, int(tokens), ACTIONS[decision.decision], decision.line)


def _count_marks(run_decisions: Sequence[RunDecisions]) -> str:
    """Describe the number of marked steps of each run."""
    steps = {
        entry.run.name: len({decision.step for decision in entry.decisions})
        for entry in run_decisions
        if entry.decisions
    }
    listed = [f"{number} of {name}" for name, number in list(steps.items())[:MAX_LEGEND]]
    return ", ".join(listed) + (f" and of {len(steps) - MAX_LEGEND} more runs" if len(steps) > MAX_LEGEND else "")


def domain_curves(architectures: Sequence[Architecture]) -> Picture:
    """Build the figure of every run's loss on each domain at its evaluations, with a panel per domain."""
    panels = [(domain.split, domain.domain) for split in SPLITS for domain in architectures[0].runs[0].split(split)]

    def draw(theme: Theme, stacked: bool) -> bytes:
        columns = 1 if stacked else min(len(panels), MAX_PANEL_COLUMNS)
        rows = ceil(len(panels) / columns)
        width = 4.6 if stacked else 10.0 if columns > 1 else 7.0
        figure = new_figure((width, 0.9 + 3.1 * rows), theme)
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
        line_styles = styles(architectures, theme)
        for panel, ax in zip(panels, axes.flat, strict=False):
            style_axes(ax, theme)
            _draw_domain(ax, architectures, panel, line_styles)
            _limit_losses(ax, architectures, panel)
            ax.set_title(f"{panel[1]} ({SPLITS[panel[0]]})", loc="left", fontsize=10.5, color=theme.ink)
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for column in range(columns):
            last = (len(panels) - 1 - column) // columns
            axes[last, column].tick_params(labelbottom=True)
            _token_axis(axes[last, column], theme)
        for ax in axes[:, 0]:
            ax.set_ylabel("nats per token", fontsize=9.5, color=theme.ink)
        legend_above(figure, line_styles.legend, theme, narrow=stacked)
        return png(figure)

    alt = "Loss over training tokens on each evaluated domain, one panel per domain and one line per run"
    return Picture("domain_loss", alt, {"domain_loss.csv": as_csv(DOMAIN_COLUMNS, _domain_rows(architectures))}, draw)


def smooth_training_loss(run: Run) -> tuple[IntArray, IntArray, FloatArray]:
    """Return steps, tokens and averaged training loss of the points to draw, [P] each, including the last step.

    A point's loss is the mean over the last tenth of the steps so far, at most 100 steps.
    """
    sums = np.concatenate([[0.0], np.cumsum(run.losses)])
    ends = np.arange(1, len(run.steps) + 1)
    windows = np.clip((WINDOW * run.steps).astype(np.int64), 1, MAX_WINDOW)
    starts = np.searchsorted(run.steps, run.steps - windows, side="right")
    means = (sums[ends] - sums[starts]) / (ends - starts)
    visible = np.flatnonzero(run.tokens >= HIDDEN_START * run.tokens[-1])
    chosen = visible[np.unique(np.linspace(0, len(visible) - 1, min(len(visible), MAX_POINTS)).round().astype(int))]
    return run.steps[chosen], run.tokens[chosen], means[chosen]


def _draw_domain(
    ax: Axes, architectures: Sequence[Architecture], panel: tuple[Split, str], line_styles: Styles
) -> None:
    widths = _line_widths(architectures)
    for architecture, run in _runs(architectures):
        style = line_styles.by_label[architecture.label]
        tokens, losses = domain_loss_curve(run, *panel)
        ax.plot(tokens, losses, style.line, color=style.color, linewidth=widths[architecture.label], alpha=0.9)
        ax.plot(tokens, losses, style.marker, color=style.color, markersize=2.6, linestyle="none")


def _limit_losses(ax: Axes, architectures: Sequence[Architecture], panel: tuple[Split, str]) -> None:
    """Limit a panel to the losses after the first tenth of a run: earlier, much higher losses would flatten them."""
    shown = []
    for _architecture, run in _runs(architectures):
        tokens, losses = domain_loss_curve(run, *panel)
        shown.append(losses[tokens > FLATTENING_START * run.tokens[-1]])
    values = np.concatenate(shown)
    if len(values) and np.ptp(values) > 0:
        margin = 0.05 * float(np.ptp(values))
        ax.set_ylim(float(values.min()) - margin, float(values.max()) + margin)


def domain_loss_curve(run: Run, split: Split, domain: str) -> tuple[IntArray, FloatArray]:
    """Return tokens and loss (nats per token) of a run's evaluations on a domain, [E] each."""
    (evaluations,) = (entry for entry in run.split(split) if entry.domain == domain)
    tokens = run.tokens[np.searchsorted(run.steps, run.evaluation_steps)]
    return tokens, evaluations.losses.sum(axis=1) / evaluations.tokens.sum()


def _domain_rows(architectures: Sequence[Architecture]) -> Iterator[tuple[Any, ...]]:
    for (architecture, run), split in product(list(_runs(architectures)), SPLITS):
        for domain in run.split(split):
            pairs = zip(run.evaluation_steps, *domain_loss_curve(run, split, domain.domain), strict=True)
            names = (run.name, architecture.label, run.seed, column_name(split), domain.domain)
            yield from ((*names, int(step), int(tokens), float(loss)) for step, tokens, loss in pairs)


def _runs(architectures: Sequence[Architecture]) -> Iterator[tuple[Architecture, Run]]:
    return ((architecture, run) for architecture in architectures for run in architecture.runs)


def _line_widths(architectures: Sequence[Architecture]) -> dict[str, float]:
    """Return line widths by label. The baseline is drawn first and widest, so that it stays visible below others."""
    return {architecture.label: 1.2 if index else 2.4 for index, architecture in enumerate(architectures)}


def _token_axis(ax: Axes, theme: Theme) -> None:
    ax.set_xscale("log")
    ax.set_xlabel("training tokens", fontsize=9.5, color=theme.ink)
    count_axis(ax.xaxis)
    ax.yaxis.set_major_locator(MaxNLocator(6))
