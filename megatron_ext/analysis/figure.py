"""Figure of evaluation loss over training loss, with one line per architecture, and of the gaps to the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ext.analysis.matched import Comparison, training_loss
from megatron_ext.analysis.run_files import FloatArray, Split, column_name
from megatron_ext.analysis.runs import Run
from megatron_ext.analysis.style import (
    LIGHT,
    Picture,
    Styles,
    Theme,
    as_csv,
    legend_above,
    new_figure,
    png,
    style_axes,
    styles,
)

WIDE_SIZE = (10.0, 6.6)
"""Size in inches with the panels of two splits side by side."""
STACKED_SIZE = (4.6, 11.6)
"""Size in inches with the panels of two splits stacked, for narrow screens."""

TITLES: dict[Split, str] = {
    "test": "Out of domain",
    "validation": "In domain, held out",
    "test_in_domain": "In domain, test text",
}


COLUMNS = ("panel", "architecture", "split", "run", "training_loss", "value", "low", "high")
"""Columns of the plotted numbers, in nats per token. Panel `loss` has a row per run and evaluation. Panel `gap` has a
row per architecture and training loss, with the 95 % interval."""


def matched_loss(comparison: Comparison) -> Picture:
    """Build the figure with its numbers."""
    rows = [*_loss_rows(comparison), *_gap_rows(comparison)]
    alt = "Loss out of domain and in domain over training loss, one line per architecture"
    if _has_gaps(comparison):
        alt += f"; below them the gaps to {comparison.baseline.label} at matched training loss"
    tables = {"matched_loss_drawn.csv": as_csv(COLUMNS, rows)}
    return Picture("matched_loss", alt, tables, lambda theme, stacked: draw(comparison, theme, stacked=stacked))


def _loss_rows(comparison: Comparison) -> Iterator[tuple[Any, ...]]:
    for architecture in comparison.architectures:
        for run, split in product(architecture.runs, TITLES):
            if run.split(split):
                pairs = zip(training_loss(run, comparison.window), split_loss(run, split), strict=True)
                names = ("loss", architecture.label, column_name(split), run.name)
                yield from ((*names, float(x), float(y), "", "") for x, y in pairs)


def _gap_rows(comparison: Comparison) -> Iterator[tuple[Any, ...]]:
    for split in TITLES:
        for measured in comparison.select(split)[1:]:
            gap = measured.gap
            rows = zip(comparison.training_losses, gap.value, gap.low, gap.high, strict=True)
            yield from (("gap", measured.architecture, column_name(split), "", *map(float, row)) for row in rows)


def draw(comparison: Comparison, theme: Theme = LIGHT, *, stacked: bool = False) -> bytes:
    """Draw the figure as PNG.

    The upper panels show loss over training loss with a marker per evaluation, the last one large. The lower panels
    show the gap to the baseline with its 95 % band, which is not visible at the scale of the curves. Training loss
    falls to the right, so that training proceeds from left to right.

    Args:
        comparison: comparison to draw.
        theme: colors.
        stacked: panels below one another instead of side by side.
    """
    splits: list[Split] = [split for split in TITLES if comparison.select(split)]
    with_gaps = _has_gaps(comparison)
    size = _size(len(splits), with_gaps, stacked)
    figure = new_figure(size, theme)
    axes = _panels(figure, splits, with_gaps, stacked)
    line_styles = styles(comparison.architectures, theme)
    for (split, is_gap), ax in axes.items():
        style_axes(ax, theme)
        draw_panel = _draw_gaps if is_gap else _draw_curves
        draw_panel(ax, comparison, split, line_styles)
    _label_axes(axes, comparison, with_gaps, stacked, theme)
    legend_above(figure, line_styles.legend, theme, narrow=stacked)
    return png(figure)


def _has_gaps(comparison: Comparison) -> bool:
    return len(comparison.architectures) > 1 and comparison.is_matched


def _size(splits: int, with_gaps: bool, stacked: bool) -> tuple[float, float]:
    width, height = STACKED_SIZE if stacked else WIDE_SIZE
    if stacked:
        return width, height * splits / 2 * (1.0 if with_gaps else 0.6)
    return width * (0.2 + 0.4 * splits), height * (1.0 if with_gaps else 0.65)


def _panels(figure: Figure, splits: Sequence[Split], with_gaps: bool, stacked: bool) -> dict[tuple[Split, bool], Axes]:
    """Return the axes by (split, is gap panel); all share the x axis of training loss."""
    kinds = [False, True] if with_gaps else [False]
    ratio = {False: 1.6, True: 1.0}
    if stacked:
        order = list(product(splits, kinds))
        grid = figure.subplots(len(order), 1, sharex=True, squeeze=False, height_ratios=[ratio[k] for _, k in order])
    else:
        order = [(split, kind) for kind, split in product(kinds, splits)]
        ratios = [ratio[kind] for kind in kinds]
        grid = figure.subplots(len(kinds), len(splits), sharex=True, squeeze=False, height_ratios=ratios)
    return dict(zip(order, grid.ravel(), strict=True))


def split_loss(run: Run, split: Split) -> FloatArray:
    """Return the token-weighted mean loss [E] over a split's domains at each evaluation, in nats per token."""
    domains = run.split(split)
    nats = np.sum([domain.losses.sum(axis=1) for domain in domains], axis=0)
    return nats / sum(int(domain.tokens.sum()) for domain in domains)


def _draw_curves(ax: Axes, comparison: Comparison, split: Split, line_styles: Styles) -> None:
    for architecture in comparison.architectures:
        style = line_styles.by_label[architecture.label]
        for run in architecture.runs:
            x, y = training_loss(run, comparison.window), split_loss(run, split)
            order = np.argsort(x)  # the order of the interpolation
            ax.plot(x[order], y[order], style.line, color=style.color, linewidth=1.4, alpha=0.9)
            ax.plot(x, y, style.marker, color=style.color, markersize=3.2, linestyle="none")
            edge = ax.get_facecolor()  # separates overlapping final points
            ax.plot(
                x[-1],
                y[-1],
                style.marker,
                color=style.color,
                markersize=6.5 if line_styles.shares_legend else 9.5,
                mec=edge,
                mew=1.2,
                zorder=5,
            )


def _draw_gaps(ax: Axes, comparison: Comparison, split: Split, line_styles: Styles) -> None:
    x = comparison.training_losses
    baseline, *others = comparison.select(split)
    ax.axhline(0.0, color=line_styles.by_label[baseline.architecture].color, linewidth=1.4)
    for other in others:
        style = line_styles.by_label[other.architecture]
        ax.plot(x, other.gap.value, style.line, color=style.color, linewidth=1.4)
        if not line_styles.shares_legend:  # many bands would hide each other
            ax.fill_between(x, other.gap.low, other.gap.high, color=style.color, alpha=0.22, linewidth=0)
        levels = list(comparison.levels)
        ax.plot(x[levels], other.gap.value[levels], style.marker, color=style.color, markersize=3.6, linestyle="none")


def _label_axes(
    axes: dict[tuple[Split, bool], Axes], comparison: Comparison, with_gaps: bool, stacked: bool, theme: Theme
) -> None:
    """Add titles and units, with y labels only at the left and x labels only at the bottom."""
    leftmost = next(iter(axes))[0]
    for (split, is_gap), ax in axes.items():
        name = f"gap to {_short_label(comparison.baseline.label)}" if is_gap else "loss"
        ax.set_title(f"{TITLES[split]}: {name}", loc="left", fontsize=10.5, color=theme.ink)
        if stacked or split == leftmost:
            ax.set_ylabel("nats per token", fontsize=9.5, color=theme.ink)
        if stacked or is_gap == with_gaps:
            ax.tick_params(labelbottom=True)
    last = list(axes.values())[-1]
    last.xaxis.set_inverted(True)  # the x axis is shared: one call inverts all panels
    text = "training loss (nats per token), falling during training \u2192"
    last.figure.supxlabel(text, fontsize=10, color=theme.ink)


def _short_label(label: str) -> str:
    return label if len(label) <= 20 else "baseline"
