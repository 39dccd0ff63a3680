"""Figures of loss over the matched loss, of the gaps to the baseline, and of out-of-domain less in-domain loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ext.analysis.findings import MATCHED
from megatron_ext.analysis.matched import Comparison, Measurement
from megatron_ext.analysis.matched_runs import loss_to_match
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
row per architecture and matched loss (`training_loss`), with the 95 % interval."""

SHIFT_COLUMNS = ("architecture", "run", "training_loss", "value")
"""Columns of the figure of out-of-domain loss less in-domain loss, with a row per run and evaluation."""

MARGIN = 0.03
"""Share of the drawn range that is left free at each side."""


def matched_loss(comparison: Comparison) -> Picture:
    """Build the figure with its numbers."""
    rows = [*_loss_rows(comparison), *_gap_rows(comparison)]
    name = MATCHED[comparison.match]
    alt = f"Loss out of domain and in domain over {name}, one line per architecture"
    if _has_gaps(comparison):
        alt += f"; below them the gaps to {_baseline_name(comparison)} at matched {name}"
    tables = {"matched_loss_drawn.csv": as_csv(COLUMNS, rows)}
    return Picture("matched_loss", alt, tables, lambda theme, stacked: draw(comparison, theme, stacked=stacked))


def _loss_rows(comparison: Comparison) -> Iterator[tuple[Any, ...]]:
    for architecture in comparison.architectures:
        for run, split in product(architecture.runs, TITLES):
            if run.split(split):
                pairs = zip(_x(comparison, run), run.split_loss(split), strict=True)
                names = ("loss", architecture.label, column_name(split), run.name)
                yield from ((*names, float(x), float(y), "", "") for x, y in pairs)


def _gap_rows(comparison: Comparison) -> Iterator[tuple[Any, ...]]:
    for split in TITLES:
        for measured in comparison.compared(split):
            gap, known = measured.gap, ~np.isnan(measured.gap.value)
            columns = (comparison.matched_losses, gap.value, gap.low, gap.high)
            rows = zip(*(column[known] for column in columns), strict=True)
            yield from (("gap", measured.architecture, column_name(split), "", *map(float, row)) for row in rows)


def _x(comparison: Comparison, run: Run) -> FloatArray:
    return loss_to_match(run, comparison.match, comparison.window)


def _baseline_name(comparison: Comparison) -> str:
    """Return the label of the baseline, or `the baseline` if there are several or the label is long."""
    label = comparison.baseline.label
    return label if len(comparison.groups) == 1 and len(label) <= 20 else "the baseline"


def region_of_interest(comparison: Comparison) -> tuple[float, float]:
    """Return the lowest and highest matched loss to draw.

    The later half of each run's evaluations is drawn. Early evaluations at much higher losses would flatten the curves.
    """
    losses = [_x(comparison, run) for architecture in comparison.architectures for run in architecture.runs]
    low, high = min(float(x.min()) for x in losses), max(float(np.median(x)) for x in losses)
    margin = MARGIN * (high - low) or MARGIN * high
    return low - margin, high + margin


def domain_shift(comparison: Comparison) -> Picture | None:
    """Build the figure of out-of-domain loss less in-domain validation loss; None without validation losses."""
    if not comparison.baseline.runs[0].split("validation"):
        return None

    def curve(run: Run) -> tuple[FloatArray, FloatArray]:
        return _x(comparison, run), run.split_loss("test") - run.split_loss("validation")

    def draw_shift(theme: Theme, stacked: bool) -> bytes:
        figure = new_figure((4.6, 4.4) if stacked else (10.0, 4.4), theme)
        ax = figure.subplots()
        style_axes(ax, theme)
        line_styles = styles(comparison.architectures, theme)
        _draw_runs(ax, comparison, curve, line_styles)
        _limit(ax, comparison, [curve(run) for run in _runs(comparison)])
        ax.xaxis.set_inverted(True)
        ax.set_xlabel(_x_title(comparison), fontsize=10, color=theme.ink)
        ax.set_ylabel("nats per token", fontsize=9.5, color=theme.ink)
        legend_above(figure, line_styles.legend, theme, narrow=stacked)
        return png(figure)

    rows = (
        (architecture.label, run.name, float(x), float(y))
        for architecture in comparison.architectures
        for run in architecture.runs
        for x, y in zip(*curve(run), strict=True)
    )
    alt = f"Out-of-domain loss less in-domain loss over {MATCHED[comparison.match]}, one line per run"
    return Picture("domain_shift", alt, {"domain_shift.csv": as_csv(SHIFT_COLUMNS, rows)}, draw_shift)


def _runs(comparison: Comparison) -> list[Run]:
    return [run for architecture in comparison.architectures for run in architecture.runs]


def draw(comparison: Comparison, theme: Theme = LIGHT, *, stacked: bool = False) -> bytes:
    """Draw the figure as PNG.

    The upper panels show loss over the matched loss with a marker per evaluation, the last one large. On the dotted
    line both are equal. The lower panels show the gap to the baseline with its 95 % band, which is not visible at the
    scale of the curves. The matched loss falls to the right, so that training proceeds from left to right.

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
    return bool(comparison.compared("test"))


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


def _draw_curves(ax: Axes, comparison: Comparison, split: Split, line_styles: Styles) -> None:
    def curve(run: Run) -> tuple[FloatArray, FloatArray]:
        return _x(comparison, run), run.split_loss(split)

    _draw_runs(ax, comparison, curve, line_styles)
    _limit(ax, comparison, [curve(run) for run in _runs(comparison)])
    ax.axline((0.0, 0.0), slope=1.0, color=ax.yaxis.label.get_color(), linewidth=0.8, alpha=0.5, linestyle=(0, (1, 2)))


def _draw_runs(
    ax: Axes, comparison: Comparison, curve: Callable[[Run], tuple[FloatArray, FloatArray]], line_styles: Styles
) -> None:
    """Draw a curve of every run with a marker per evaluation, the last one large."""
    for architecture in comparison.architectures:
        style = line_styles.by_label[architecture.label]
        for run in architecture.runs:
            x, y = curve(run)
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


def _limit(ax: Axes, comparison: Comparison, curves: Sequence[tuple[FloatArray, FloatArray]]) -> None:
    """Limit a panel to the region of interest of the matched loss and to the values in it."""
    low, high = region_of_interest(comparison)
    values = np.concatenate([y[(x >= low) & (x <= high)] for x, y in curves])
    values = values[~np.isnan(values)]
    ax.set_xlim(low, high)
    if len(values):
        margin = max(MARGIN * float(np.ptp(values)), 1e-3)
        ax.set_ylim(float(values.min()) - margin, float(values.max()) + margin)


def _draw_gaps(ax: Axes, comparison: Comparison, split: Split, line_styles: Styles) -> None:
    x = comparison.matched_losses
    ax.axhline(0.0, color=line_styles.by_label[comparison.baseline.label].color, linewidth=1.4)
    others = comparison.compared(split)
    for other in others:
        style = line_styles.by_label[other.architecture]
        ax.plot(x, other.gap.value, style.line, color=style.color, linewidth=1.4)
        if not line_styles.shares_legend:  # many bands would hide each other
            ax.fill_between(x, other.gap.low, other.gap.high, color=style.color, alpha=0.18, linewidth=0)
        levels = sorted({*comparison.levels, comparison.headlines[other.architecture]})
        ax.plot(x[levels], other.gap.value[levels], style.marker, color=style.color, markersize=3.6, linestyle="none")
    _limit(ax, comparison, [(x, line) for other in others for line in _drawn_ends(other)])


def _drawn_ends(other: Measurement) -> tuple[FloatArray, FloatArray]:
    """Return the lines that a gap panel must show: the band, where it is at most three times as wide as usual."""
    gap = other.gap
    half = (gap.high - gap.low) / 2
    if np.isnan(half).all():
        return gap.value, gap.value
    half = np.minimum(np.nan_to_num(half), 3 * float(np.nanmedian(half)))
    return gap.value - half, gap.value + half


def _label_axes(
    axes: dict[tuple[Split, bool], Axes], comparison: Comparison, with_gaps: bool, stacked: bool, theme: Theme
) -> None:
    """Add titles and units, with y labels only at the left and x labels only at the bottom."""
    leftmost = next(iter(axes))[0]
    for (split, is_gap), ax in axes.items():
        name = f"gap to {_baseline_name(comparison)}" if is_gap else "loss"
        ax.set_title(f"{TITLES[split]}: {name}", loc="left", fontsize=10.5, color=theme.ink)
        if stacked or split == leftmost:
            ax.set_ylabel("nats per token", fontsize=9.5, color=theme.ink)
        if stacked or is_gap == with_gaps:
            ax.tick_params(labelbottom=True)
    last = list(axes.values())[-1]
    last.xaxis.set_inverted(True)  # the x axis is shared: one call inverts all panels
    last.figure.supxlabel(_x_title(comparison), fontsize=10, color=theme.ink)


def _x_title(comparison: Comparison) -> str:
    return f"{MATCHED[comparison.match]} (nats per token), falling during training \u2192"
