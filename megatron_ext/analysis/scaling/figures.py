"""Pictures of scaling laws: the surface with its points, the best loss for a compute, IsoFLOP parabolas, test loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from megatron_ext.analysis.figure import DPI, LIGHT, MARKERS, dress, png
from megatron_ext.analysis.scaling.isoflop import Budget
from megatron_ext.analysis.scaling.law import Fit
from megatron_ext.analysis.scaling.transfer import Line
from megatron_ext.analysis.scaling.uncertainty import Sampled

SIZE = (11.0, 4.8)
COLOURS = "viridis"
BEYOND = 2.0
"""How far the plots go beyond the points, as a factor."""


def draw_law(fitted: Fit, sampled: Sampled, title: str) -> bytes:
    """The law as PNG: contours of the loss over parameters and tokens, and the best loss over compute."""
    figure, (surface, frontier) = _figure(2, title)
    _draw_surface(surface, fitted)
    _draw_frontier(frontier, fitted, sampled)
    return png(figure)


def draw_budgets(budgets: Sequence[Budget], title: str) -> bytes:
    """IsoFLOP parabolas as PNG, each with its points and its lowest place."""
    figure, (ax,) = _figure(1, title)
    for budget, shade in zip(budgets, _shades(len(budgets)), strict=True):
        points = budget.points
        ax.plot(points.params, points.losses, "o", color=shade, markersize=4, label=f"{budget.flops:.2g} operations")
        grid = np.geomspace(points.params.min(), points.params.max(), 100)
        ax.plot(grid, np.polyval(budget.curve, np.log(grid)), color=shade, linewidth=1.3)
        if budget.best_params is not None:
            lowest = np.polyval(budget.curve, np.log(budget.best_params))
            ax.plot(budget.best_params, lowest, "*", color=shade, markersize=13, mec=LIGHT.ink, mew=0.8, zorder=5)
    ax.set_xscale("log")
    ax.set_xlabel("parameters")
    ax.set_ylabel("loss (nats per token)")
    ax.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return png(figure)


def draw_transfer(lines: Mapping[str, Line]) -> bytes:
    """Test loss over training loss as PNG: models by mixer, and the power law of each."""
    figure, (ax,) = _figure(1, "Test loss over training loss")
    for number, (mixer, line) in enumerate(lines.items()):
        color = LIGHT.palette[number % len(LIGHT.palette)]
        marker = MARKERS[number % len(MARKERS)]
        losses = np.exp(line.log_train), np.exp(line.log_test)
        ax.plot(*losses, marker, color=color, markersize=5, label=mixer or "models")
        grid = np.linspace(line.log_train.min(), line.log_train.max(), 50)
        ax.plot(np.exp(grid), np.exp(line.at(grid)), color=color, linewidth=1.3)
    ax.set(xscale="log", yscale="log", xlabel="training loss (nats per token)", ylabel="test loss (nats per token)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(StrMethodFormatter("{x:.2f}"))
    ax.legend(frameon=False, fontsize=9)
    return png(figure)


def _figure(panels: int, title: str) -> tuple[Figure, Sequence[Axes]]:
    width, height = SIZE
    figure = Figure(figsize=(width if panels > 1 else 0.75 * width, height), dpi=DPI, layout="constrained")
    figure.set_facecolor(LIGHT.paper)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, color=LIGHT.ink)
    axes: Sequence[Axes] = figure.subplots(1, panels, squeeze=False)[0]
    for ax in axes:
        dress(ax, LIGHT)
    return figure, axes


def _draw_surface(ax: Axes, fitted: Fit) -> None:
    points, law = fitted.points, fitted.law
    n, d = (np.geomspace(x.min() / BEYOND, x.max() * BEYOND, 120) for x in (points.params, points.tokens))
    loss_dn = law.loss(n[None], d[:, None])
    norm = Normalize(float(points.losses.min()), float(np.percentile(points.losses, 95)))
    levels = np.linspace(norm.vmin, norm.vmax, 12)  # type: ignore[arg-type]
    contours = ax.contour(n, d, loss_dn, levels=levels, cmap=COLOURS, norm=norm, linewidths=1.0)
    ax.clabel(contours, fontsize=7.5, fmt="%.2f")
    shown = ax.scatter(points.params, points.tokens, c=points.losses, cmap=COLOURS, norm=norm, s=18)
    shown.set(edgecolors=LIGHT.ink, linewidths=0.3)
    if law.falls:
        flops = 6 * np.array([n[0] * d[0], n[-1] * d[-1]])
        best = law.best_params(flops)
        ax.plot(best, flops / 6 / best, "--", color=LIGHT.ink, linewidth=1.2, label="best size for a compute")
        ax.legend(frameon=False, fontsize=8.5, loc="lower right")
    ax.set(xscale="log", yscale="log", xlim=(n[0], n[-1]), ylim=(d[0], d[-1]), xlabel="parameters", ylabel="tokens")
    ax.set_title("loss (nats per token), and the points by colour", loc="left", fontsize=10)


def _draw_frontier(ax: Axes, fitted: Fit, sampled: Sampled) -> None:
    points, law = fitted.points, fitted.law
    flops_p = 6 * points.params * points.tokens
    if law.falls:
        grid = np.geomspace(flops_p.min() / BEYOND, flops_p.max() * BEYOND, 80)
        best = law.best_params(grid)
        low, high = sampled.band(best, grid / 6 / best)
        ax.fill_between(grid, low, high, color=LIGHT.palette[0], alpha=0.25, linewidth=0, label="95 % interval")
        losses = law.loss(best, grid / 6 / best)
        ax.plot(grid, losses, color=LIGHT.palette[0], linewidth=1.6, label="law, at the best size")
        ax.legend(frameon=False, fontsize=8.5)
    shown = ax.scatter(flops_p, points.losses, c=points.params, cmap=COLOURS, norm=LogNorm(), s=16)
    bar = ax.figure.colorbar(shown, ax=ax, pad=0.02)
    bar.set_label("parameters", fontsize=9)
    ax.set(xscale="log", xlabel="operations (6 x parameters x tokens)", ylabel="loss (nats per token)")
    ax.set_title("the points, and the law where it is lowest", loc="left", fontsize=10)


def _shades(number: int) -> Sequence[tuple[float, float, float, float]]:
    """Colours that rise."""
    return [colormaps[COLOURS](place) for place in np.linspace(0.0, 0.92, number)]
