"""Section of a report on scaling laws: conclusions for pairs of mixers, tables, remarks and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, text
from megatron_ext.analysis.scaling.fit_output import (
    SIGNIFICANCE,
    describe_back_test,
    describe_isoflop,
    describe_test_loss,
    format_difference,
    format_interval,
    render_files,
)
from megatron_ext.analysis.scaling.fitting import MixerFit, MixerPair, ScalingFit
from megatron_ext.analysis.scaling.uncertainty import PARAMS_EXPONENT
from megatron_ext.analysis.scaling.unidentifiable import CONSTANTS, undetermined_names
from megatron_ext.analysis.style import Picture


@dataclass(frozen=True)
class Scaling:
    """Contents of the section.

    Attributes:
        answers: one line for each pair of mixers on their difference.
        constants: table of the constants of each mixer's law, with intervals.
        remarks: heading and text of remarks on each mixer and on runs that were excluded.
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


def section(result: ScalingFit) -> Scaling:
    """Build the section of a fit."""
    remarks = [remark for mixer, own in result.mixers.items() for remark in _remarks(mixer, own)]
    remarks += [("Left out", f"{run}.") for run in result.runs.excluded]
    return Scaling(
        answers=[_answer(pair) for pair in result.differences],
        constants=_constants(result),
        remarks=remarks,
        transfer=_transfer(result),
        pairs=_pairs(result),
        pictures=result.pictures,
        files=["fit.json", "fit.md", *render_files(result)],
    )


def _answer(pair: MixerPair) -> str:
    first, second, difference = pair
    p = f"p = {difference.p_value:.2g}"
    if difference.p_value >= SIGNIFICANCE:
        return f"{second} and {first} do not differ significantly ({p})"
    train_loss, ratio = format_difference(difference)
    return f"{second} differs from {first} ({p}), by {ratio} at a training loss of {train_loss} nats per token"


def _constants(result: ScalingFit) -> Table:
    rows = []
    for mixer, own in result.mixers.items():
        cells = []
        for name in CONSTANTS:
            value = getattr(own.fitted.law, name)
            interval = format_interval(own.uncertainty.interval(name), ".3g") or "interval unknown"
            cells.append(Cell(f"{value:.5g}", value, interval))
        rows.append([text(mixer), count(len(own.fitted.points)), *cells, _exponent(own)])
    caption = "L(N, D) = E + A / N^alpha + B / D^beta in nats per token, with 95\u00a0% profile-likelihood intervals"
    return Table(caption, ["mixer", "runs", *CONSTANTS, "best size grows as compute^"], rows, notes_below=True)


def _exponent(result: MixerFit) -> Cell:
    """Return the exponent of the optimal size by the law; that of the IsoFLOP parabolas is among the remarks."""
    law, unidentifiable = result.fitted.law, undetermined_names(result.uncertainty.unidentifiable)
    if not law.is_decreasing or "alpha" in unidentifiable or "beta" in unidentifiable:
        return NOTHING
    interval = format_interval(result.uncertainty.interval(PARAMS_EXPONENT), ".3f") or "interval unknown"
    return Cell(f"{law.params_exponent:.3f}", law.params_exponent, interval)


def _remarks(mixer: str, result: MixerFit) -> Sequence[tuple[str, str]]:
    remarks = [("Warning", f"{line}.") for line in result.warnings]
    remarks += [("Back-test", describe_back_test(result.back_test)), ("IsoFLOP", describe_isoflop(result))]
    if result.test_loss is not None:
        remarks.append(("Test loss", describe_test_loss(result.test_loss)))
    return [(f"{mixer}: {heading}", sentence) for heading, sentence in remarks]


def _transfer(result: ScalingFit) -> Table | None:
    rows = []
    for mixer, own in result.mixers.items():
        if (line := own.test_loss) is not None:
            low, high = line.exponent_interval
            exponent = Cell(f"{line.exponent:.4g}", line.exponent, f"{low:.3g} to {high:.3g}")
            deviation = Cell(f"{100 * line.deviation:.2f} %", line.deviation)
            rows.append(
                [text(mixer), count(len(line.residuals)), Cell(f"{line.factor:.4g}", line.factor), exponent, deviation]
            )
    caption = (
        "Test loss = factor * training loss^exponent, with 95\u00a0% intervals, and the deviation of the runs from it"
    )
    return (
        Table(caption, ["mixer", "runs", "factor", "exponent", "deviation"], rows, notes_below=True) if rows else None
    )


def _pairs(result: ScalingFit) -> Table | None:
    rows = [_pair_row(pair, "all out of domain", pair[2].p_value) for pair in result.differences]
    rows += [_pair_row(d.pair, d.domain, d.adjusted_p_value) for d in result.domain_differences]
    caption = (
        "Whether two mixers have the same curve of test over training loss (Wald test for each pair; the p-values on "
        "single domains are adjusted for their number)"
    )
    columns = ["mixer", "other", "test text", "p-value", "training loss", "relative test loss of other"]
    return Table(caption, columns, rows) if rows else None


def _pair_row(pair: MixerPair, tested: str, p_value: float) -> list[Cell]:
    first, second, difference = pair
    train_loss, ratio = format_difference(difference)
    relative = Cell(ratio, difference.ratio) if difference.ratio is not None else NOTHING
    p = Cell(f"{p_value:.2g}", p_value)
    return [text(first), text(second), text(tested), p, Cell(train_loss, difference.train_loss), relative]
