"""Table and figure of validation loss over the values of chosen fields."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from megatron_ext.analysis.architecture import Architecture
from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, number, text
from megatron_ext.analysis.choices import Choice, Choices, Trial, is_number
from megatron_ext.analysis.style import (
    Picture,
    Theme,
    as_csv,
    count_axis,
    legend_above,
    new_figure,
    png,
    style_axes,
    styles,
)

BEST, STOPPED = "chosen", "stopped by a faulty step"


def choice_table(choices: Choices) -> Table:
    """Return a table with a row for each value of each architecture, with its loss and the distance to the lowest."""
    fields = _fields(choices)
    rows = [
        [
            text(choice.label),
            *(_value_cell(trial.settings[field]) for field in fields),
            *_result_cells(trial, choice.best),
        ]
        for choice in choices.choices
        for trial in choice.trials
    ]
    columns = ["architecture", *fields, "seeds", "validation loss", "above the lowest", "remark"]
    caption = f"Validation loss after the last step in nats per token, by which {', '.join(fields)} is chosen"
    return Table(caption, columns, rows)


def _result_cells(trial: Trial, best: Trial) -> list[Cell]:
    seeds = count(len(trial.losses))
    if not isfinite(trial.loss):
        return [seeds, NOTHING, NOTHING, text(STOPPED)]
    return [seeds, number(trial.loss), number(trial.loss - best.loss), text(BEST) if trial is best else NOTHING]


def choice_figures(choices: Choices, architectures: Sequence[Architecture]) -> list[Picture]:
    """Return a figure of validation loss over each chosen field that is a number, one line per architecture.

    Where several fields are chosen, a point is the lowest loss over the values of the others.

    Args:
        choices: the choices.
        architectures: architectures of all chosen runs, the baseline first, for the line styles.
    """
    trials = [trial for choice in choices.choices for trial in choice.trials]
    numeric = [field for field in _fields(choices) if all(is_number(trial.settings[field]) for trial in trials)]
    return [_figure(choices, field, architectures) for field in numeric]


def _figure(choices: Choices, field: str, architectures: Sequence[Architecture]) -> Picture:
    curves = {choice.label: _curve(choice, field) for choice in choices.choices}
    is_positive = all(value > 0 for curve in curves.values() for value in curve)

    def draw(theme: Theme, stacked: bool) -> bytes:
        figure = new_figure((4.6, 4.2) if stacked else (7.0, 4.2), theme)
        ax = figure.subplots()
        style_axes(ax, theme)
        line_styles = styles(architectures, theme)
        for label, curve in curves.items():
            if not curve:  # a run with each value was stopped by a faulty step
                continue
            style = line_styles.by_label[label]
            ax.plot(list(curve), list(curve.values()), style.line, marker=style.marker, markersize=4, color=style.color)
            best = min(curve, key=lambda value: curve[value])
            ax.plot(best, curve[best], style.marker, markersize=9, color=style.color)
        ax.set_xlabel(field, fontsize=9.5, color=theme.ink)
        ax.set_ylabel("validation loss (nats per token)", fontsize=9.5, color=theme.ink)
        if is_positive:
            ax.set_xscale("log")
            count_axis(ax.xaxis, "{:.3g}".format)
        legend_above(figure, line_styles.legend, theme, narrow=stacked)
        return png(figure)

    name = f"choice_{field.replace('.', '_')}"
    alt = f"Validation loss after the last step over {field}, one line per architecture; its lowest point is larger"
    rows = [(label, value, loss) for label, curve in curves.items() for value, loss in curve.items()]
    return Picture(name, alt, {f"{name}.csv": as_csv(("architecture", field, "validation_loss"), rows)}, draw)


def _curve(choice: Choice, field: str) -> dict[float, float]:
    """Return the lowest loss for each value of a field, ascending, without runs stopped by a faulty step."""
    lowest: dict[float, float] = {}
    for trial in choice.trials:
        value = trial.settings[field]
        if isfinite(trial.loss):
            lowest[value] = min(trial.loss, lowest.get(value, inf))
    return dict(sorted(lowest.items()))


def _fields(choices: Choices) -> list[str]:
    return list(dict.fromkeys(field for choice in choices.choices for field in choice.fields))


def _value_cell(value: object) -> Cell:
    return Cell(f"{value:g}", value) if is_number(value) else text(str(value))
