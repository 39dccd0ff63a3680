"""Section of a report on scaling laws: conclusions for pairs of mixers, tables, remarks and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, text
from megatron_ext.analysis.scaling.fitting import (
    Fitting,
    Found,
    Pair,
    apart_cells,
    budget_line,
    files_of,
    interval_words,
    test_line,
    transfer_line,
    warnings_of,
)
from megatron_ext.analysis.scaling.uncertainty import PARAMS_EXPONENT
from megatron_ext.analysis.scaling.unidentifiable import CONSTANTS, names_of
from megatron_ext.analysis.style import Picture

SIGNIFICANCE = 0.05
"""Significance level of the difference of two mixers' test losses."""


@dataclass(frozen=True)
class Scaling:
    """Contents of the section.

    Attributes:
        answers: one line for each pair of mixers on their difference.
        constants: table of the constants of each mixer's law, with intervals.
        remarks: heading and text of remarks on each mixer and on runs that were left out.
        transfer: table of the laws of test loss over training loss; None: there are no test losses.
        pairs: table of the differences between mixers in these laws; None: there is no pair.
        pictures: figures of laws, IsoFLOP parabolas and test loss.
        files: names of all files of the fit.
    """

    answers: Sequence[str]
    constants: Table
    remarks: Sequence[tuple[str, str]]
    transfer: Table | None
    pairs: Table | None
    pictures: Sequence[Picture]
    files: Sequence[str]


def section(found: Fitting) -> Scaling:
    """Build the section of a fit."""
    remarks = [remark for mixer, one in found.mixers.items() for remark in _remarks(mixer, one)]
    remarks += [("Left out", f"{one}.") for one in found.runs.left_out]
    return Scaling(
        answers=[_answer(pair) for pair in found.apart],
        constants=_constants(found),
        remarks=remarks,
        transfer=_transfer(found),
        pairs=_pairs(found.apart),
        pictures=found.pictures,
        files=["fit.json", "fit.md", *files_of(found)],
    )


def _answer(pair: Pair) -> str:
    one, other, apart = pair
    p = f"p = {apart.p_value:.2g}"
    if apart.p_value >= SIGNIFICANCE:
        return f"{other} and {one} do not differ significantly ({p})"
    at, ratio = apart_cells(apart)
    return f"{other} differs from {one} ({p}), by {ratio} at a training loss of {at} nats per token"


def _constants(found: Fitting) -> Table:
    rows = []
    for mixer, one in found.mixers.items():
        cells = []
        for name in CONSTANTS:
            value = getattr(one.fitted.law, name)
            interval = interval_words(one.sure.interval(name), ".3g") or "interval unknown"
            cells.append(Cell(f"{value:.5g}", value, interval))
        rows.append([text(mixer), count(len(one.fitted.points)), *cells, _exponent(one)])
    caption = "L(N, D) = E + A / N^alpha + B / D^beta in nats per token, with 95\u00a0% profile-likelihood intervals"
    return Table(caption, ["mixer", "runs", *CONSTANTS, "best size grows as compute^"], rows, below=True)


def _exponent(one: Found) -> Cell:
    """Return the exponent of the optimal size by the law; that of the IsoFLOP parabolas is among the remarks."""
    law, unidentifiable = one.fitted.law, names_of(one.sure.unidentifiable)
    if not law.falls or "alpha" in unidentifiable or "beta" in unidentifiable:
        return NOTHING
    interval = interval_words(one.sure.interval(PARAMS_EXPONENT), ".3f") or "interval unknown"
    return Cell(f"{law.params_exponent:.3f}", law.params_exponent, interval)


def _remarks(mixer: str, one: Found) -> Sequence[tuple[str, str]]:
    found = [("Warning", f"{line}.") for line in warnings_of(one)]
    found += [("Back-test", test_line(one.tested)), ("IsoFLOP", budget_line(one))]
    if one.transfer is not None:
        found.append(("Test loss", transfer_line(one.transfer)))
    return [(f"{mixer}: {what}", words) for what, words in found]


def _transfer(found: Fitting) -> Table | None:
    rows = []
    for mixer, one in found.mixers.items():
        if (line := one.transfer) is not None:
            low, high = line.exponent_interval
            exponent = Cell(f"{line.exponent:.4g}", line.exponent, f"{low:.3g} to {high:.3g}")
            deviation = Cell(f"{100 * line.deviation:.2f} %", line.deviation)
            rows.append(
                [text(mixer), count(len(line.rest)), Cell(f"{line.factor:.4g}", line.factor), exponent, deviation]
            )
    caption = (
        "Test loss = factor * training loss^exponent, with 95\u00a0% intervals, and the deviation of the runs from it"
    )
    return Table(caption, ["mixer", "runs", "factor", "exponent", "deviation"], rows, below=True) if rows else None


def _pairs(apart: Sequence[Pair]) -> Table | None:
    rows = []
    for one, other, difference in apart:
        at, ratio = apart_cells(difference)
        p_value = Cell(f"{difference.p_value:.2g}", difference.p_value)
        relative = Cell(ratio, difference.ratio) if difference.ratio is not None else NOTHING
        rows.append([text(one), text(other), p_value, Cell(at, difference.train_loss), relative])
    caption = "Whether two mixers have the same curve of test over training loss (Wald test for each pair)"
    columns = ["mixer", "other", "p-value", "training loss", "relative test loss of other"]
    return Table(caption, columns, rows) if rows else None
