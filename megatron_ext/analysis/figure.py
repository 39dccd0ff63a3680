"""The study's plot: evaluation loss over training loss, one line an architecture, and the gaps between the lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megatron_ext.analysis.architecture import Architecture
from megatron_ext.analysis.matched import Comparison, Measured, training_loss
from megatron_ext.analysis.runs import FloatArray, Run, Split

DPI = 150
WIDE = (10.0, 6.6)
"""Inches: panels of two splits side by side."""
STACKED = (4.6, 11.6)
"""Inches: panels of two splits below one another, for a phone."""

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours that people with a colour-vision deficiency tell apart (Okabe & Ito 2008), without its yellow and black."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
TITLES: dict[Split, str] = {
    "test": "Out of domain",
    "validation": "In domain, held out",
    "test_in_domain": "In domain, test text",
}


@dataclass(frozen=True)
class Theme:
    """Colours of paper, ink (the baseline's) and of the other lines. On dark paper the sky blue stands for the blue."""

    paper: str
    ink: str
    muted: str
    grid: str
    palette: tuple[str, ...]


LIGHT = Theme(paper="#ffffff", ink="#1a1a1a", muted="#5c5c5c", grid="#e4e4e4", palette=OKABE_ITO)
DARK = Theme(paper="#15181c", ink="#f0f0f0", muted="#a8adb3", grid="#30353b", palette=(OKABE_ITO[5], *OKABE_ITO[1:5]))


@dataclass(frozen=True)
class _Style:
    color: str
    marker: str
    line: Literal["-", "--", ":", "-."]


def draw(comparison: Comparison, theme: Theme = LIGHT, *, stacked: bool = False) -> bytes:
    """The plot as PNG.

    Above, loss over training loss with a marker an evaluation, the final one large; below, the gap to the
    baseline with its 95 % band, which the scale of the curves would hide. Training loss falls to the right, so that
    training goes as one reads.

    Args:
        comparison: what to draw.
        theme: colours of paper and ink.
        stacked: panels below one another instead of side by side.
    """
    splits: list[Split] = [split for split in TITLES if comparison.select(split)]
    with_gaps = len(comparison.architectures) > 1
    size = _size(len(splits), with_gaps, stacked)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor=theme.paper)
    FigureCanvasAgg(figure)
    axes = _panels(figure, splits, with_gaps, stacked)
    styles = _styles(comparison.architectures, theme)
    for (split, is_gap), ax in axes.items():
        dress(ax, theme)
        draw_panel = _draw_gaps if is_gap else _draw_curves
        draw_panel(ax, comparison, split, styles)
    _label_axes(axes, comparison, with_gaps, stacked, theme)
    _legend(figure, styles, theme, columns=1 if stacked else min(len(styles), 3))
    return png(figure)


def png(figure: Figure) -> bytes:
    """The same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _size(splits: int, with_gaps: bool, stacked: bool) -> tuple[float, float]:
    width, height = STACKED if stacked else WIDE
    if stacked:
        return width, height * splits / 2 * (1.0 if with_gaps else 0.6)
    return width * (0.2 + 0.4 * splits), height * (1.0 if with_gaps else 0.65)


def _panels(figure: Figure, splits: Sequence[Split], with_gaps: bool, stacked: bool) -> dict[tuple[Split, bool], Axes]:
    """Axes by (split, is it the gap's panel); all share the training loss on x."""
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


def _styles(architectures: Sequence[Architecture], theme: Theme) -> dict[str, _Style]:
    """Baseline in ink, the others through the palette; further rounds of it change the line."""
    lines: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
    styles = {}
    for index, one in enumerate(architectures):
        color = theme.ink if index == 0 else theme.palette[(index - 1) % len(theme.palette)]
        line = lines[(max(index, 1) - 1) // len(theme.palette) % len(lines)]
        styles[one.label] = _Style(color, MARKERS[index % len(MARKERS)], line)
    return styles


def split_loss(run: Run, split: Split) -> FloatArray:
    """[E] token-weighted mean loss over a split's domains at each evaluation, nats a token."""
    domains = run.split(split)
    nats = np.sum([domain.losses.sum(axis=1) for domain in domains], axis=0)
    return nats / sum(int(domain.tokens.sum()) for domain in domains)


def _draw_curves(ax: Axes, comparison: Comparison, split: Split, styles: dict[str, _Style]) -> None:
    for one in comparison.architectures:
        style = styles[one.label]
        for run in one.runs:
            x, y = training_loss(run, comparison.window), split_loss(run, split)
            order = np.argsort(x)  # as the interpolation sees it
            ax.plot(x[order], y[order], style.line, color=style.color, linewidth=1.4, alpha=0.9)
            ax.plot(x, y, style.marker, color=style.color, markersize=3.2, linestyle="none")
            edge = ax.get_facecolor()  # keeps final points apart where they lie over one another
            ax.plot(x[-1], y[-1], style.marker, color=style.color, markersize=9.5, mec=edge, mew=1.2, zorder=5)


def _draw_gaps(ax: Axes, comparison: Comparison, split: Split, styles: dict[str, _Style]) -> None:
    x = comparison.training_losses
    measured: list[Measured] = comparison.select(split)
    ax.axhline(0.0, color=styles[measured[0].architecture].color, linewidth=1.4)
    for one in measured[1:]:
        style = styles[one.architecture]
        ax.plot(x, one.gap.value, style.line, color=style.color, linewidth=1.4)
        ax.fill_between(x, one.gap.low, one.gap.high, color=style.color, alpha=0.22, linewidth=0)
        at = list(comparison.levels)
        ax.plot(x[at], one.gap.value[at], style.marker, color=style.color, markersize=3.6, linestyle="none")


def dress(ax: Axes, theme: Theme) -> None:
    """Colours, grid and ticks of a plot."""
    ax.set_facecolor(theme.paper)
    ax.grid(color=theme.grid, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(colors=theme.muted, labelsize=9, length=3)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_locator(MaxNLocator(6))
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)


def _label_axes(
    axes: dict[tuple[Split, bool], Axes], comparison: Comparison, with_gaps: bool, stacked: bool, theme: Theme
) -> None:
    """Titles and units where a reader looks for them: y at the left, x at the bottom."""
    leftmost = next(iter(axes))[0]
    for (split, is_gap), ax in axes.items():
        name = f"gap to {_short(comparison.baseline.label)}" if is_gap else "loss"
        ax.set_title(f"{TITLES[split]}: {name}", loc="left", fontsize=10.5, color=theme.ink)
        if stacked or split == leftmost:
            ax.set_ylabel("nats per token", fontsize=9.5, color=theme.ink)
        if stacked or is_gap == with_gaps:
            ax.tick_params(labelbottom=True)
    last = list(axes.values())[-1]
    last.xaxis.set_inverted(True)  # shared: one call turns all panels
    text = "training loss (nats per token), falling as training goes on \u2192"
    last.figure.supxlabel(text, fontsize=10, color=theme.ink)


def _short(label: str) -> str:
    return label if len(label) <= 20 else "baseline"


def _legend(figure: Figure, styles: dict[str, _Style], theme: Theme, columns: int) -> None:
    handles = [
        Line2D([], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=5, label=label)
        for label, style in styles.items()
    ]
    legend = figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=10, labelcolor=theme.ink
    )
    legend.set_in_layout(True)
