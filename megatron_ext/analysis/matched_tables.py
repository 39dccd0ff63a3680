"""Tables of a comparison at matched loss."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, number, signed, text
from megatron_ext.analysis.findings import MATCHED, interval_text
from megatron_ext.analysis.matched import ALL_DOMAINS, Comparison, Estimate, Measurement
from megatron_ext.analysis.matched_runs import loss_to_match
from megatron_ext.analysis.run_files import SPLITS, Split, column_name
from megatron_ext.utils.markdown import csv_row
from megatron_ext.utils.ratio_interval import FEW_DOCUMENTS

BASELINE_CELL = Cell("baseline", 0.0)

COLUMNS = (
    "architecture",
    "split",
    "domain",
    "training_loss",
    "headline",
    "loss",
    "loss_standard_error",
    "loss_low",
    "loss_high",
    "gap",
    "gap_standard_error",
    "gap_standard_error_documents",
    "gap_low",
    "gap_high",
    "seeds",
    "seed_standard_deviation",
    "documents",
    "tokens",
    "documents_needed",
    "baseline",
    "matched",
    "gap_detectable",
    "gap_standard_error_curve",
    "family_low",
    "family_high",
)
"""Columns of matched_loss.csv, which has a row per architecture, domain (or all) and matched loss. Losses are in nats
per token. `training_loss` is the matched loss; `matched` says whether it is the training or the validation loss.
`documents_needed` is the number of documents needed to detect a gap of `RESOLUTION`. `family_low` and `family_high` are
the interval that holds for all gaps of the headline at once. Unknown values are empty."""


def render_table(comparison: Comparison) -> str:
    """Return matched_loss.csv: every architecture and domain at the tabulated losses and its own headline.

    See `COLUMNS`.
    """
    num_seeds = {architecture.label: len(architecture.runs) for architecture in comparison.architectures}
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for measured in comparison.measured:
        for level in _tabulated(comparison, measured.architecture):
            if not math.isnan(measured.gap.value[level]):
                row = _csv_row(measured, level, comparison, num_seeds[measured.architecture])
                writer.writerow(csv_row(row))
    return stream.getvalue()


def _tabulated(comparison: Comparison, *labels: str) -> list[int]:
    """Return the indices of the tabulated losses and of the headlines of some architectures, highest loss first."""
    return sorted(
        {*comparison.levels, *(comparison.headlines[label] for label in labels if label in comparison.headlines)}
    )


def _csv_row(measured: Measurement, level: int, comparison: Comparison, num_seeds: int) -> list[Any]:
    loss, gap = measured.loss, measured.gap
    is_headline = level == comparison.headlines.get(measured.architecture)
    names = [measured.architecture, column_name(measured.split), measured.domain]
    names += [_decimal(comparison.matched_losses[level]), str(is_headline).lower()]
    estimates = [e[level] for e in (loss.value, loss.error, loss.low, loss.high)]
    estimates += [e[level] for e in (gap.value, gap.error, gap.document_error, gap.low, gap.high)]
    needed = measured.documents_needed(level)
    sizes = [measured.documents, measured.tokens, "" if needed is None else needed]
    family = (math.nan, math.nan)
    if is_headline and (measured.split, measured.domain) == ("test", ALL_DOMAINS):
        family = comparison.family.get(measured.architecture, family)
    return [
        *names,
        *map(_decimal, estimates),
        num_seeds,
        _decimal(measured.seed_spread[level]),
        *sizes,
        measured.baseline,
        comparison.match,
        _decimal(gap.detectable[level]),
        _decimal(measured.curve_error[level]),
        *map(_decimal, family),
    ]


def _decimal(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


def evaluated_splits(comparison: Comparison) -> list[Split]:
    """Return the evaluated splits in the order of display."""
    return [split for split in SPLITS if comparison.select(split)]


def range_table(comparison: Comparison) -> Table:
    """Return a table with the range of each run's matched losses at its evaluations."""
    rows = []
    for architecture in comparison.architectures:
        for run in architecture.runs:
            losses = loss_to_match(run, comparison.match, comparison.window)
            extremes = number(float(losses.max())), number(float(losses.min()))
            rows.append([text(run.name), text(architecture.label), *extremes])
    name = MATCHED[comparison.match]
    caption = f"{name[0].upper()}{name[1:]}es at which each run was evaluated, nats per token"
    return Table(caption, ["run", "architecture", "highest", "lowest"], rows)


def gap_cell(gap: Estimate, at: int) -> Cell:
    """Format a gap with its interval; a dash where it is unknown."""
    if math.isnan(gap.value[at]):
        return NOTHING
    return Cell(signed(gap.value[at]).text, gap.value[at], interval_text(gap.low[at], gap.high[at]))


def headline_table(comparison: Comparison) -> Table:
    """Return a table of losses and gaps at the lowest loss that each architecture and its baseline reached."""
    splits = evaluated_splits(comparison)
    seeds = {architecture.label: len(architecture.runs) for architecture in comparison.architectures}
    has_seeds = max(seeds.values()) > 1
    several = len([group for group in comparison.groups if group.others]) > 1
    name = MATCHED[comparison.match]
    columns = ["architecture", *(["baseline"] if several else []), name]
    for split in splits:
        columns += [f"loss {SPLITS[split]}", "gap (95\u00a0% interval)"]
        columns += ["for all gaps at once"] if split == "test" and comparison.family else []
        columns += ["standard deviation over seeds"] if has_seeds else []
    rows = []
    for index, architecture in enumerate(comparison.architectures):
        at = comparison.headlines.get(architecture.label)
        if at is None:
            continue
        label, num_seeds = architecture.label, seeds[architecture.label]
        first = comparison.select(splits[0])[index]
        row = [text(label, f"{num_seeds} seeds" if num_seeds > 1 else "")]
        row += [text("" if first.is_baseline else first.baseline)] if several else []
        row.append(number(comparison.matched_losses[at]))
        for split in splits:
            measured = comparison.select(split)[index]
            row += [
                number(measured.loss.value[at]),
                BASELINE_CELL if measured.is_baseline else gap_cell(measured.gap, at),
            ]
            if split == "test" and comparison.family:
                row.append(text(interval_text(*comparison.family.get(label, (math.nan, math.nan)))))
            row += [number(measured.seed_spread[at])] if has_seeds else []
        rows.append(row)
    caption = f"Each at the lowest {name} that it and its baseline reached; all values in nats per token"
    caption += "" if several else f"; gap: loss minus that of {comparison.baseline.label}"
    return Table(caption, columns, rows, notes_below=True)


def precision_table(comparison: Comparison, resolution: float) -> Table:
    """Return a table of the errors of out-of-domain gaps, and of what would have been needed to detect smaller ones."""
    rows = []
    for measured in comparison.compared("test"):
        at = comparison.headlines[measured.architecture]
        needed = measured.documents_needed(at)
        rows.append(
            [
                text(measured.architecture),
                number(measured.gap.detectable[at]),
                number(measured.gap.error[at]),
                number(measured.gap.document_error[at]),
                number(measured.curve_error[at]),
                count(measured.documents),
                NOTHING if needed is None else count(needed),
            ]
        )
    columns = ["architecture", "smallest gap detectable alone", "standard error", "from documents alone"]
    columns += ["from the curves alone", "documents scored", f"documents needed for a gap of {resolution} nats"]
    return Table("Out-of-domain gap at the headline, nats per token", columns, rows)


def level_table(comparison: Comparison) -> Table:
    """Return a table of the gaps out of domain to the baseline, with a row per matched loss."""
    others = comparison.compared("test")
    rows = []
    for level in _tabulated(comparison, *(other.architecture for other in others)):
        row = [number(comparison.matched_losses[level])]
        row += [number(one.loss.value[level]) for one in comparison.select("test") if one.is_baseline]
        rows.append([*row, *(gap_cell(other.gap, level) for other in others)])
    baselines = [one.architecture for one in comparison.select("test") if one.is_baseline]
    caption = "Loss of the baseline and the gaps to it, nats per token; a dash where one of both did not have that loss"
    columns = [MATCHED[comparison.match], *baselines, *(other.architecture for other in others)]
    return Table(caption, columns, rows, notes_below=True)


def domain_table(comparison: Comparison) -> Table:
    """Return a table of losses and gaps at the headline, with a row per domain and architecture."""
    rows = []
    for split in SPLITS:
        names = dict.fromkeys(measured.domain for measured in comparison.measured if measured.split == split)
        for name in (name for name in names if name != ALL_DOMAINS):
            found = comparison.compared(split, name) or comparison.select(split, name)
            for measured in (one for one in found if one.architecture in comparison.headlines):
                at = comparison.headlines[measured.architecture]
                labels = text(name), text(SPLITS[split]), text(measured.architecture)
                loss = number(measured.loss.value[at])
                gap = BASELINE_CELL if measured.is_baseline else gap_cell(measured.gap, at)
                level = number(comparison.matched_losses[at])
                rows.append([*labels, level, loss, gap, count(measured.documents), count(measured.tokens)])
    columns = ["domain", "split", "architecture", MATCHED[comparison.match], "loss", "gap (95\u00a0% interval)"]
    return Table("Losses in nats per token", [*columns, "documents", "tokens"], rows)


def small_domains(comparison: Comparison) -> Sequence[str]:
    """Return the domains with too few documents for a reliable interval."""
    small = {measured.domain for measured in comparison.measured if measured.documents < FEW_DOCUMENTS}
    return sorted(small - {ALL_DOMAINS})
