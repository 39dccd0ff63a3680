"""Figures of scaling laws: loss surface, compute-optimal frontier, IsoFLOP parabolas and test loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.analysis.scaling.isoflop import Budget
from megatron_ext.analysis.scaling.law import Fit, ScalingLaw
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.transfer import Line
from megatron_ext.analysis.scaling.uncertainty import Uncertainty
from megatron_ext.analysis.style import (
    DARK,
    MARKERS,
    Picture,
    Theme,
    as_csv,
    count_axis,
    new_figure,
    png,
    power_of_ten,
    style_axes,
)

WIDE_SIZE, PANEL_SIZE = (12.0, 4.8), (4.6, 4.4)
"""Sizes in inches: two panels side by side, and one panel."""
COLOR_MAP = "viridis"
EXTENSION_FACTOR = 2.0
"""Factor by which the plots extend beyond the points."""
CURVE_POINTS = 80
SURFACE_POINTS = 40
"""Grid points per axis for the intervals of the surface, which are smooth."""

WIDTH_LEVELS = np.array([factor * 10.0**power for power in range(-3, 4) for factor in (1, 2, 5)])
"""Possible boundaries between shades of interval widths, in per cent of the loss. Widths below the first are not
shown."""

MAX_SHADES, SHADE_STEP = 7, 0.11
"""Maximum number of shades, and the step between them as a fraction of the distance from `Theme.paper` to
`Theme.muted`."""

LAW_COLUMNS = ("what", "params", "tokens", "flops", "loss", "low", "high")
"""Columns of a law's numbers. Rows are the points, the law at the optimal size for each compute, and the law's surface.
The law and the surface have 95 % intervals."""
ISOFLOP_COLUMNS = ("what", "flops", "params", "loss")
"""Columns of the parabolas' numbers. Rows are points, the curve of each budget, and its minimum."""
TEST_LOSS_COLUMNS = ("what", "mixer", "training_loss", "test_loss", "low", "high")
"""Columns of the numbers of test loss over training loss. Rows are models, and each mixer's line with its 95 %
interval."""


def law_picture(name: str, fitted: Fit, uncertainty: Uncertainty, title: str) -> Picture:
    """Build the figure of a law: loss over parameters and tokens, shaded by its uncertainty, and over compute."""
    surface = _surface(fitted, uncertainty)
    frontier = _frontier(fitted, uncertainty) if fitted.law.is_decreasing else None

    def draw(theme: Theme, stacked: bool) -> bytes:
        figure, (surface_ax, frontier_ax) = _figure(2, title, theme, stacked)
        _draw_surface(surface_ax, fitted, surface if uncertainty.is_band_known else None, theme)
        _draw_frontier(frontier_ax, fitted.points, frontier, uncertainty.is_band_known, theme)
        return png(figure)

    interval = "with its 95 % interval" if uncertainty.is_band_known else "whose interval is unknown"
    alt = f"{title}: loss over parameters and tokens, and over compute at the best size, {interval}"
    return Picture(name, alt, {f"{name}.csv": as_csv(LAW_COLUMNS, _law_rows(fitted.points, surface, frontier))}, draw)


def budgets_picture(name: str, budgets: Sequence[Budget], title: str) -> Picture:
    """Build the figure of IsoFLOP parabolas, each with its points and its minimum."""

    def draw(theme: Theme, stacked: bool) -> bytes:
        figure, (ax,) = _figure(1, title, theme, stacked)
        for budget, shade in zip(budgets, _shades(len(budgets), theme), strict=True):
            points = budget.points
            ax.plot(points.params, points.losses, "o", color=shade, markersize=4, label=f"{budget.flops:.2g} FLOPs")
            ax.plot(*_parabola(budget), color=shade, linewidth=1.3)
            if budget.best_params is not None:
                lowest = np.polyval(budget.curve, np.log(budget.best_params))
                ax.plot(budget.best_params, lowest, "*", color=shade, markersize=13, mec=theme.ink, mew=0.8, zorder=5)
        if any(budget.best_params is not None for budget in budgets):
            ax.plot([], [], "*", color=theme.ink, mfc="none", markersize=9, label="minimum")
        ax.set(xscale="log", xlabel="parameters", ylabel="loss (nats per token)")
        count_axis(ax.xaxis)
        location: Literal["outside lower center", "outside right upper"]
        location, columns = ("outside lower center", 2) if stacked else ("outside right upper", 1)
        figure.legend(frameon=False, fontsize=8.5, loc=location, ncols=columns, labelcolor=theme.ink)
        return png(figure)

    alt = f"{title}: loss over parameters at equal compute, with one parabola per budget and a star at its minimum"
    return Picture(name, alt, {f"{name}.csv": as_csv(ISOFLOP_COLUMNS, _budget_rows(budgets))}, draw)


def transfer_picture(name: str, lines: Mapping[str, Line]) -> Picture:
    """Build the figure of test loss over training loss: models by mixer, and power laws with 95 % intervals."""

    def draw(theme: Theme, stacked: bool) -> bytes:
        figure, (ax,) = _figure(1, "Test loss over training loss", theme, stacked)
        for index, (mixer, line) in enumerate(lines.items()):
            color = [theme.ink, *theme.palette][index % (len(theme.palette) + 1)]
            losses = np.exp(line.log_train), np.exp(line.log_test)
            marker = MARKERS[index % len(MARKERS)]
            ax.plot(*losses, marker, color=color, markersize=5, label=mixer or "models")
            train, test, low, high = _line(line)
            ax.fill_between(train, low, high, color=color, alpha=0.18, linewidth=0)
            ax.plot(train, test, color=color, linewidth=1.3)
        ax.set(xscale="log", yscale="log", xlabel="training loss (nats per token)", ylabel="test loss (nats per token)")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(6))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(StrMethodFormatter("{x:.2f}"))
        ax.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
        return png(figure)

    alt = "Test loss over training loss, one point per model, and each mixer's power law with its 95 % interval"
    return Picture(name, alt, {f"{name}.csv": as_csv(TEST_LOSS_COLUMNS, _transfer_rows(lines))}, draw)


def _figure(panels: int, title: str, theme: Theme, stacked: bool) -> tuple[Figure, Sequence[Axes]]:
    width, height = WIDE_SIZE
    size = (PANEL_SIZE[0], panels * PANEL_SIZE[1]) if stacked else (width if panels > 1 else 0.75 * width, height)
    figure = new_figure(size, theme)
    if panels > 1 and not stacked and (engine := figure.get_layout_engine()) is not None:
        engine.set(wspace=0.05)  # type: ignore[call-arg]
    figure.suptitle(title, fontsize=12, color=theme.ink)
    shape = (panels, 1) if stacked else (1, panels)
    axes: Sequence[Axes] = list(figure.subplots(*shape, squeeze=False).flat)
    for ax in axes:
        style_axes(ax, theme)
    return figure, axes


def _draw_surface(ax: Axes, fitted: Fit, shaded: Sequence[FloatArray] | None, theme: Theme) -> None:
    """Draw contours of the loss. `shaded` are the arrays of `_surface` to shade the plot by; None: it is not shaded."""
    points, law = fitted.points, fitted.law
    n, d = _axis_values(fitted, 120)
    ax.set(xscale="log", yscale="log", xlim=(n[0], n[-1]), ylim=(d[0], d[-1]), xlabel="parameters", ylabel="tokens")
    if shaded is not None:
        _shade(ax, shaded, theme)
    loss_dn = law.loss(n[None], d[:, None])
    norm = Normalize(float(points.losses.min()), float(np.percentile(points.losses, 95)))
    levels = np.linspace(norm.vmin, norm.vmax, 12)  # type: ignore[arg-type]
    color_map = _color_map(theme)
    contours = ax.contour(n, d, loss_dn, levels=levels, cmap=color_map, norm=norm, linewidths=1.0)
    positions = _label_positions(law, n, d, levels)
    for contour_label in ax.clabel(contours, fontsize=7.5, fmt="%.2f", manual=positions, zorder=4, colors=theme.ink):
        contour_label.set_path_effects([withStroke(linewidth=2.5, foreground=theme.paper)])
    markers = ax.scatter(points.params, points.tokens, c=points.losses, cmap=color_map, norm=norm, s=26, zorder=3)
    markers.set(edgecolors=theme.ink, linewidths=0.3)
    if law.is_decreasing:
        flops = 6 * np.array([n[0] * d[0], n[-1] * d[-1]])
        best = law.best_params(flops)
        label = f"best size for a compute{_interval_note(shaded is not None)}"
        ax.plot(best, flops / 6 / best, "--", color=theme.ink, linewidth=1.2, label=label)
        legend = ax.legend(fontsize=8.5, loc="lower right", labelcolor=theme.ink, framealpha=0.85)
        legend.get_frame().set(facecolor=theme.paper, edgecolor="none")
    count_axis(ax.xaxis)
    count_axis(ax.yaxis)
    ax.set_title("loss (nats per token), and the points by colour", loc="left", fontsize=10, color=theme.ink)


def _label_positions(law: ScalingLaw, n: FloatArray, d: FloatArray, levels: FloatArray) -> list[tuple[float, float]]:
    """Return the label positions: the crossings of the contours with a line from the lower left to the upper right."""
    fractions = np.linspace(0.04, 0.78, 400)
    x, y = (
        np.exp(np.log(axis[0]) + fraction * np.log(axis[-1] / axis[0]))
        for axis, fraction in ((n, fractions), (d, fractions + 0.17))
    )
    above = law.loss(x, y)[:, None] > levels
    return [(float(x[i]), float(y[i])) for i in np.flatnonzero((above[1:] != above[:-1]).any(axis=1))]


def _shade(ax: Axes, surface: Sequence[FloatArray], theme: Theme) -> None:
    """Shade the plot by the width of the loss's 95 % interval in per cent, stronger for wider intervals."""
    params, tokens, losses, low, high = surface
    width = np.clip(100 * (high - low) / losses, WIDTH_LEVELS[0], WIDTH_LEVELS[-1])
    if width.max() <= WIDTH_LEVELS[0]:
        return
    levels = _shade_levels(width)
    color_map = LinearSegmentedColormap.from_list("width", [theme.paper, theme.muted])
    shades = color_map(SHADE_STEP * np.arange(len(levels) - 1))
    filled = ax.contourf(params, tokens, width, levels=levels, colors=shades, zorder=0)
    bar = ax.figure.colorbar(filled, ax=ax, pad=0.02, spacing="uniform", ticks=levels)
    bar.set_label("width of the 95 % interval of the loss (%)", fontsize=9, color=theme.ink)
    bar.ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    bar.outline.set_edgecolor(theme.muted)
    bar.ax.tick_params(which="both", colors=theme.muted, labelsize=8.5)


def _shade_levels(width: FloatArray) -> FloatArray:
    """Return shade boundaries that enclose all widths: from the series 1, 2, 5, 10, thinned to `MAX_SHADES`."""
    first = max(int(np.searchsorted(WIDTH_LEVELS, width.min(), side="right")) - 1, 0)
    last = max(int(np.searchsorted(WIDTH_LEVELS, width.max())), first + 1)
    stride = -(-(last - first) // MAX_SHADES)
    levels = WIDTH_LEVELS[first : last + 1 : stride]
    return levels if levels[-1] >= width.max() else np.append(levels, WIDTH_LEVELS[last])


def _axis_values(fitted: Fit, number: int) -> tuple[FloatArray, FloatArray]:
    """Return `number` values each of parameters and tokens over the extended range of the points."""
    points = fitted.points
    n, d = (
        np.geomspace(x.min() / EXTENSION_FACTOR, x.max() * EXTENSION_FACTOR, number)
        for x in (points.params, points.tokens)
    )
    return n, d


def _surface(fitted: Fit, uncertainty: Uncertainty) -> tuple[FloatArray, ...]:
    """Return parameters, tokens, loss and its interval ends on a grid, [D, N] each."""
    params, tokens = np.meshgrid(*_axis_values(fitted, SURFACE_POINTS))
    return (params, tokens, fitted.law.loss(params, tokens), *uncertainty.band(params, tokens))


def _draw_frontier(
    ax: Axes, points: Points, frontier: Sequence[FloatArray] | None, is_band_known: bool, theme: Theme
) -> None:
    """Draw the losses of the points, and the arrays of `_frontier`, over compute. None: the law is not decreasing."""
    shown_losses = points.losses
    if frontier is not None:
        _params, _tokens, grid, losses, low, high = frontier
        shown_losses = np.concatenate([shown_losses, losses])
        if is_band_known:
            ax.fill_between(grid, low, high, color=theme.palette[0], alpha=0.25, linewidth=0, label="95 % interval")
        label = f"law, at the best size{_interval_note(is_band_known)}"
        ax.plot(grid, losses, color=theme.palette[0], linewidth=1.6, label=label)
        ax.legend(frameon=False, fontsize=8.5, labelcolor=theme.ink)
    flops_p = 6 * points.params * points.tokens
    markers = ax.scatter(flops_p, points.losses, c=points.params, cmap=_color_map(theme), norm=LogNorm(), s=16)
    bar = ax.figure.colorbar(markers, ax=ax, pad=0.02)
    bar.set_label("parameters", fontsize=9, color=theme.ink)
    count_axis(bar.ax.yaxis)
    bar.ax.tick_params(which="both", colors=theme.muted, labelsize=8.5)
    margin = 0.15 * float(np.ptp(shown_losses))  # a wide interval must not determine the scale
    ax.set_ylim(float(shown_losses.min()) - margin, float(shown_losses.max()) + margin)
    ax.set(xscale="log", xlabel="compute (FLOPs: 6 x parameters x tokens)", ylabel="loss (nats per token)")
    count_axis(ax.xaxis, power_of_ten)
    ax.set_title("the points, and the law where it is lowest", loc="left", fontsize=10, color=theme.ink)


def _interval_note(is_band_known: bool) -> str:
    return "" if is_band_known else " (interval unknown)"


def _frontier(fitted: Fit, uncertainty: Uncertainty) -> tuple[FloatArray, ...]:
    """Return parameters, tokens, compute, loss and its interval ends at the optimal size, [G] each.

    The grid is the extended range of the points' compute. The law must be decreasing.
    """
    points, law = fitted.points, fitted.law
    flops_p = 6 * points.params * points.tokens
    grid = np.geomspace(flops_p.min() / EXTENSION_FACTOR, flops_p.max() * EXTENSION_FACTOR, CURVE_POINTS)
    params = law.best_params(grid)
    tokens = grid / 6 / params
    return (params, tokens, grid, law.loss(params, tokens), *uncertainty.band(params, tokens))


def _law_rows(
    points: Points, surface: Sequence[FloatArray], frontier: Sequence[FloatArray] | None
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `LAW_COLUMNS`: points, arrays of `_frontier` (None: there are none), arrays of `_surface`."""
    for n, d, loss in zip(points.params, points.tokens, points.losses, strict=True):
        yield "point", float(n), float(d), float(6 * n * d), float(loss), "", ""
    if frontier is not None:
        for row in zip(*frontier, strict=True):
            yield "law", *_cells(row)
    params, tokens, losses, low, high = (x.ravel() for x in surface)
    for row in zip(params, tokens, 6 * params * tokens, losses, low, high, strict=True):
        yield "surface", *_cells(row)


def _cells(numbers: Iterable[float]) -> Iterator[float | str]:
    """Replace numbers that are not finite by empty cells."""
    return (float(x) if np.isfinite(x) else "" for x in numbers)


def _parabola(budget: Budget) -> tuple[FloatArray, FloatArray]:
    params: FloatArray = np.geomspace(budget.points.params.min(), budget.points.params.max(), CURVE_POINTS)
    return params, np.asarray(np.polyval(budget.curve, np.log(params)))


def _budget_rows(budgets: Sequence[Budget]) -> Iterator[tuple[Any, ...]]:
    for budget in budgets:
        best = [] if budget.best_params is None else [budget.best_params]
        rows_by_kind: dict[str, tuple[Iterable[float], Iterable[float]]] = {
            "point": (budget.points.params, budget.points.losses),
            "curve": _parabola(budget),
            "lowest": (best, [float(np.polyval(budget.curve, np.log(x))) for x in best]),
        }
        for kind, pairs in rows_by_kind.items():
            yield from ((kind, budget.flops, float(n), float(loss)) for n, loss in zip(*pairs, strict=True))


def _line(line: Line) -> tuple[FloatArray, ...]:
    """Return training loss, test loss by the line and its interval ends over the models' range, [G] each."""
    grid = np.linspace(line.log_train.min(), line.log_train.max(), CURVE_POINTS)
    half_width = line.half_width(grid)
    return tuple(np.exp(x) for x in (grid, line.at(grid), line.at(grid) - half_width, line.at(grid) + half_width))


def _transfer_rows(lines: Mapping[str, Line]) -> Iterator[tuple[Any, ...]]:
    for mixer, line in lines.items():
        models = zip(np.exp(line.log_train), np.exp(line.log_test), strict=True)
        yield from (("model", mixer, float(x), float(y), "", "") for x, y in models)
        yield from (("line", mixer, *map(float, row)) for row in zip(*_line(line), strict=True))


def _color_map(theme: Theme) -> Colormap:
    """Return viridis without the end that is close to the background: yellow on white, dark violet on black."""
    low, high = (0.22, 1.0) if theme == DARK else (0.0, 0.9)
    return ListedColormap(colormaps[COLOR_MAP](np.linspace(low, high, 256)))


def _shades(number: int, theme: Theme) -> Sequence[tuple[float, float, float, float]]:
    """Return colors in the order of the color map."""
    color_map = _color_map(theme)
    return [color_map(position) for position in np.linspace(0.0, 1.0, number)]
