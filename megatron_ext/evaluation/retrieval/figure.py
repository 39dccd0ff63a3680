"""Heat maps of mean scores, one panel per task with a depth: columns are lengths, rows are depths."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from megatron_ext.evaluation.retrieval.registry import load_all
from megatron_ext.evaluation.retrieval.results import RetrievalResults, Summary

DPI = 150
PAPER, INK, MUTED, UNTESTED = "#ffffff", "#1a1a1a", "#5c5c5c", "#e4e4e4"
SCORES = LinearSegmentedColormap.from_list("scores", ["#fdf1e8", "#56B4E9", "#0072B2", "#00263d"])
"""Color map from light to dark, which is readable without color. Gray is reserved for what was not tested."""

MIN_SCORE_OF_WHITE_TEXT = 0.45
"""Score above which white letters are easier to read on a cell than black ones."""

MAX_COLUMNS = 3
CELL_SIZE = (0.56, 0.34)
"""Width and height of a cell in inches."""
PANEL_MARGIN = (0.95, 0.95)
"""Width and height of a panel's title and labels in inches."""

NO_DEPTH = "tasks without a depth"

Grid = npt.NDArray[np.float64]
Panel = tuple[str, list[str], Grid]
"""Panel: title, row labels, scores [rows, lengths]."""


def draw(results: RetrievalResults) -> bytes:
    """Draw the figure as PNG: mean scores in per cent, `–` for what was not tested.

    Tasks without a depth share the last panel, with one row per task.
    """
    lengths = sorted(results.options.lengths)
    panels = _panels(results, lengths)
    columns = min(MAX_COLUMNS, len(panels))
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    heights = [max(len(labels) for _, labels, _ in row) * CELL_SIZE[1] + PANEL_MARGIN[1] for row in rows]
    width = columns * (max(len(lengths), 4) * CELL_SIZE[0] + PANEL_MARGIN[0]) + 0.8
    figure = Figure(figsize=(width, sum(heights) + 0.5), dpi=DPI, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for ax in axes.ravel()[len(panels) :]:
        ax.set_visible(False)
    for ax, (title, labels, grid) in zip(axes.ravel(), panels, strict=False):
        image = _draw_panel(ax, title, labels, [_format_length(length) for length in lengths], grid)
    _draw_color_bar(figure, image, axes)
    figure.supxlabel("length in tokens", fontsize=10, color=INK)
    figure.supylabel("depth of the answer in the context", fontsize=10, color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})  # the same results give the same bytes
    return buffer.getvalue()


def _panels(results: RetrievalResults, lengths: Sequence[int]) -> list[Panel]:
    """Return title, row labels and scores [rows, lengths] of each panel; NaN: not tested."""
    depths = sorted(results.options.depths)
    summaries = results.by_depth()
    tasks = load_all()
    depth_tasks = [name for name in results.options.tasks if tasks[name].has_depth]
    other_tasks = [name for name in results.options.tasks if not tasks[name].has_depth]
    labels = [f"{100 * depth:.3g} %" for depth in depths]
    panels: list[Panel] = [
        (task, labels, _grid(summaries, [(task, depth) for depth in depths], lengths)) for task in depth_tasks
    ]
    if other_tasks:
        panels.append((NO_DEPTH, [*other_tasks], _grid(summaries, [(task, None) for task in other_tasks], lengths)))
    return panels


def _grid(summaries: Sequence[Summary], rows: Sequence[tuple[str, float | None]], lengths: Sequence[int]) -> Grid:
    scores = {(summary.task, summary.depth, summary.length): summary.score for summary in summaries}
    return np.array([[scores.get((*row, length), math.nan) for length in lengths] for row in rows])


def _draw_panel(ax: Axes, title: str, rows: Sequence[str], columns: Sequence[str], grid: Grid) -> AxesImage:
    ax.set_facecolor(UNTESTED)
    image = ax.imshow(grid, cmap=SCORES, vmin=0.0, vmax=1.0, aspect="auto")
    ax.set_title(title, loc="left", fontsize=10.5, color=INK)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    if title != NO_DEPTH:
        ax.set_ylabel("depth", fontsize=9, color=INK)
    ax.tick_params(colors=MUTED, labelsize=8.5, length=0)
    ax.hlines(np.arange(1, len(rows)) - 0.5, -0.5, len(columns) - 0.5, color=PAPER, linewidth=0.8)
    ax.vlines(np.arange(1, len(columns)) - 0.5, -0.5, len(rows) - 0.5, color=PAPER, linewidth=0.8)
    for (row, column), score in np.ndenumerate(grid):
        text = "\u2013" if math.isnan(score) else f"{100 * score:.0f}"
        color = PAPER if score > MIN_SCORE_OF_WHITE_TEXT else INK
        ax.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
    ax.spines[:].set_visible(False)
    return image


def _draw_color_bar(figure: Figure, image: AxesImage, axes: npt.NDArray[np.object_]) -> None:
    color_bar = figure.colorbar(image, ax=axes, fraction=0.03, aspect=30, pad=0.01)
    color_bar.set_label("mean score", fontsize=9.5, color=INK)
    color_bar.set_ticks([0.0, 0.5, 1.0], labels=["0 %", "50 %", "100 %"])
    color_bar.ax.tick_params(colors=MUTED, labelsize=8.5, length=0)
    color_bar.outline.set_visible(False)


def _format_length(tokens: int) -> str:
    """Format a length, as `128k` for multiples of 1024."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
