"""Common style of all figures of a report: themes, line styles of architectures, axes and PNG output."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from megatron_ext.analysis.architecture import Architecture, mixer_label
from megatron_ext.utils.markdown import csv_row

DPI = 150

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Palette for color-vision deficiency (Okabe & Ito 2008), without its yellow and black."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

MAX_LEGEND = 8
"""Maximum number of architectures with separate legend entries. With more, those of one mixer share a color."""

MAX_PALENESS = 0.62
"""Fraction by which the color of the smallest model of a mixer is mixed with the background."""

MAGNITUDES = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Theme:
    """Colors of the background (`paper`), of text and the baseline (`ink`) and of the other lines (`palette`)."""

    paper: str
    ink: str
    muted: str
    grid: str
    palette: tuple[str, ...]


LIGHT = Theme(paper="#ffffff", ink="#1a1a1a", muted="#5c5c5c", grid="#e4e4e4", palette=OKABE_ITO)
DARK = Theme(paper="#15181c", ink="#f0f0f0", muted="#a8adb3", grid="#30353b", palette=(OKABE_ITO[5], *OKABE_ITO[1:5]))


@dataclass(frozen=True)
class Picture:
    """Figure with its numbers.

    Attributes:
        name: stem of its file names.
        alt: alternative text.
        tables: plotted numbers as CSV, by file name.
        draw: function from a theme, and whether panels are stacked for narrow screens, to a PNG.
    """

    name: str
    alt: str
    tables: Mapping[str, str]
    draw: Callable[[Theme, bool], bytes]

    def __post_init__(self) -> None:
        # The page and the files share a drawing: each variant is drawn once.
        object.__setattr__(self, "draw", cache(self.draw))

    def files(self) -> dict[str, bytes]:
        """Return the PNG file and the CSV files by name."""
        return {f"{self.name}.png": self.draw(LIGHT, False)} | {
            name: text.encode() for name, text in self.tables.items()
        }


@dataclass(frozen=True)
class Style:
    """Line style."""

    color: str
    marker: str
    line: Literal["-", "--", ":", "-."]


@dataclass(frozen=True)
class Styles:
    """Line styles by architecture label (`by_label`) and by legend entry (`legend`)."""

    by_label: Mapping[str, Style]
    legend: Mapping[str, Style]

    @property
    def shares_legend(self) -> bool:
        """True if architectures share legend entries."""
        return list(self.by_label) != list(self.legend)


def styles(architectures: Sequence[Architecture], theme: Theme) -> Styles:
    """Assign line styles to architectures.

    The baseline has the text color. The others cycle through the palette, and each further cycle changes the dash
    pattern. If there are more than `MAX_LEGEND` architectures, they have the color of their mixer, paler for smaller
    models and shorter runs.
    """
    labels = [architecture.label for architecture in architectures]
    mixers = [mixer_label(architecture.runs[0]) for architecture in architectures]
    distinct_mixers = list(dict.fromkeys(mixers))
    if len(labels) <= MAX_LEGEND or len(distinct_mixers) == len(labels):
        distinct = {label: _style(index, theme) for index, label in enumerate(labels)}
        return Styles(distinct, distinct)
    legend = {mixer: _style(index, theme) for index, mixer in enumerate(distinct_mixers)}
    members_of: dict[str, list[Architecture]] = {mixer: [] for mixer in distinct_mixers}
    for architecture, mixer in zip(architectures, mixers, strict=True):
        members_of[mixer].append(architecture)
    by_label: dict[str, Style] = {}
    for mixer, style in legend.items():
        members = sorted(members_of[mixer], key=_size_key)
        for member, paleness in zip(members, np.linspace(MAX_PALENESS, 0.0, len(members)), strict=True):
            by_label[member.label] = Style(_blend(style.color, theme.paper, float(paleness)), style.marker, style.line)
    return Styles({label: by_label[label] for label in labels}, legend)


def _style(index: int, theme: Theme) -> Style:
    lines: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
    color = theme.ink if index == 0 else theme.palette[(index - 1) % len(theme.palette)]
    line = lines[(max(index, 1) - 1) // len(theme.palette) % len(lines)]
    return Style(color, MARKERS[index % len(MARKERS)], line)


def _size_key(architecture: Architecture) -> tuple[int, int]:
    run = architecture.runs[0]
    return (run.size.parameters if run.size else 0, int(run.steps[-1]))


def _blend(color: str, paper: str, fraction: float) -> str:
    red, green, blue = (1 - fraction) * np.array(to_rgb(color)) + fraction * np.array(to_rgb(paper))
    return to_hex((red, green, blue))


def new_figure(size: tuple[float, float], theme: Theme) -> Figure:
    """Create a figure that needs no display; `size` is in inches."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor=theme.paper)
    FigureCanvasAgg(figure)
    return figure


def png_width(picture: bytes) -> int:
    """Return the width of a PNG in pixels."""
    return int.from_bytes(picture[16:20], "big")


def png(figure: Figure) -> bytes:
    """Render a figure as PNG; equal figures give equal bytes."""
    # Names of domains and architectures may contain a $, which would begin a formula.
    titles = {ax.get_title("left") for ax in figure.axes}
    for artist in figure.findobj():
        if isinstance(artist, Legend):
            for text in artist.get_texts():
                text.set_parse_math(False)
        elif isinstance(artist, Text) and artist.get_text() in titles:
            artist.set_parse_math(False)
    # `Figure.savefig` would draw twice, first without output for the layout. `draw` computes the layout itself.
    canvas = cast("FigureCanvasAgg", figure.canvas)
    canvas.draw()
    buffer = io.BytesIO()
    imsave(buffer, canvas.buffer_rgba(), format="png", dpi=figure.dpi, metadata={"Software": None})  # type: ignore[dict-item]
    return buffer.getvalue()


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table as CSV, floating-point numbers with 8 significant digits."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(csv_row(f"{cell:.8g}" if isinstance(cell, float) else cell for cell in row) for row in rows)
    return stream.getvalue()


def style_axes(ax: Axes, theme: Theme) -> None:
    """Set colors, grid and ticks of a plot."""
    ax.set_facecolor(theme.paper)
    ax.grid(color=theme.grid, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(colors=theme.muted, labelsize=9, length=3)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_locator(MaxNLocator(6))
    for label in (ax.xaxis.label, ax.yaxis.label, ax.title):
        label.set_color(theme.ink)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)


def count_axis(axis: Axis, format_value: Callable[[float], str] | None = None) -> None:
    """Set tick labels such as 300k, 1M, 2B on a logarithmic axis of parameters or tokens, without crowding.

    Args:
        axis: axis whose limits are set.
        format_value: formats a tick value; None: `short_count`.
    """
    format_tick = format_value or short_count
    low, high = sorted(axis.get_view_interval())
    decades = np.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 3.2 else (1.0,)
    if decades < 0.5:
        axis.set_major_locator(MaxNLocator(5))
    else:
        axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: format_tick(value)))
    axis.set_minor_formatter(NullFormatter())


def short_count(value: float) -> str:
    """Format a number with a magnitude letter, such as 1.23M for 1234567."""
    for size, letter in MAGNITUDES:
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def power_of_ten(value: float) -> str:
    """Format a number with one digit and a power of ten, such as 2e10."""
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def legend_above(figure: Figure, entries: Mapping[str, Style], theme: Theme, *, narrow: bool) -> None:
    """Add a legend above the plots, in as many columns as the length of the names allows."""
    width = 44 if narrow else 126
    names = ["\n".join(textwrap.wrap(label, min(width, 60))) for label in entries]
    longest = max(len(line) for name in names for line in name.split("\n"))
    handles = [
        Line2D([], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=5, label=name)
        for name, style in zip(names, entries.values(), strict=True)
    ]
    columns = max(1, min(len(names), width // (longest + 8), 4))
    legend = figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=10, labelcolor=theme.ink
    )
    legend.set_in_layout(True)
