"""Tables and text summary of a comparison at matched training loss."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, number, signed, text
from megatron_ext.analysis.matched import ALL_DOMAINS, Comparison, Estimate, Measurement, training_loss
from megatron_ext.analysis.run_files import SPLITS, FloatArray, Split, column_name
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
)
"""Columns of matched_loss.csv, which has a row per architecture, domain (or all) and training loss. Losses are in nats
per token. `documents_needed` is the number of documents needed to detect a gap of `RESOLUTION`, empty if unknown."""


def render_table(comparison: Comparison) -> str:
    """Return matched_loss.csv: every architecture and domain at every tabulated training loss; see `COLUMNS`."""
    num_seeds = {architecture.label: len(architecture.runs) for architecture in comparison.architectures}
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for measured in comparison.measured:
        for level in comparison.levels:
            row = _csv_row(measured, level, comparison, num_seeds[measured.architecture])
            writer.writerow(csv_row(row))
    return stream.getvalue()


def _csv_row(measured: Measurement, level: int, comparison: Comparison, num_seeds: int) -> list[Any]:
    loss, gap = measured.loss, measured.gap
    x = comparison.training_losses[level]
    estimates = [e[level] for e in (loss.value, loss.error, loss.low, loss.high)]
    estimates += [e[level] for e in (gap.value, gap.error, gap.document_error, gap.low, gap.high)]
    numbers = ["" if math.isnan(value) else f"{value:.6f}" for value in estimates]
    spread = measured.seed_spread[level]
    seed_deviation = "" if math.isnan(spread) else f"{spread:.6f}"
    headline = str(level == comparison.headline).lower()
    names = [measured.architecture, column_name(measured.split), measured.domain, f"{x:.6f}", headline]
    needed = measured.documents_needed(level)
    sizes = [measured.documents, measured.tokens]
    return [*names, *numbers, num_seeds, seed_deviation, *sizes, "" if needed is None else needed]


def evaluated_splits(comparison: Comparison) -> list[Split]:
    """Return the evaluated splits in the order of display."""
    return [split for split in SPLITS if comparison.select(split)]


def describe_unmatched(comparison: Comparison) -> str:
    """Describe two runs without a common training loss, as a sentence without the full stop; empty if all have one."""
    if comparison.is_matched:
        return ""
    runs = [run for architecture in comparison.architectures for run in architecture.runs]
    losses = [(run, training_loss(run, comparison.window)) for run in runs]
    highest, highest_losses = max(losses, key=lambda pair: float(pair[1].min()))
    lowest, lowest_losses = min(losses, key=lambda pair: float(pair[1].max()))
    return (
        "The runs have no training loss in common, so nothing is compared at matched training loss: "
        f"{highest.name} was evaluated at training losses of {_range(highest_losses)}, "
        f"{lowest.name} at {_range(lowest_losses)}; "
        f"train {highest.name} longer, or evaluate {lowest.name} earlier"
    )


def _range(losses: FloatArray) -> str:
    return f"{number(float(losses.max())).text} to {number(float(losses.min())).text}"


def range_table(comparison: Comparison) -> Table:
    """Return a table with the range of each run's training losses at its evaluations."""
    rows = []
    for architecture in comparison.architectures:
        for run in architecture.runs:
            losses = training_loss(run, comparison.window)
            extremes = number(float(losses.max())), number(float(losses.min()))
            rows.append([text(run.name), text(architecture.label), *extremes])
    caption = "Training losses at which each run was evaluated, nats per token"
    return Table(caption, ["run", "architecture", "highest", "lowest"], rows)


def verdicts(comparison: Comparison) -> list[dict[str, str]]:
    """Return, for each architecture except the baseline, how its out-of-domain loss compares with the baseline's.

    Returns:
        Mappings with `label`, `verdict` (`higher`, `lower`, `same` or `unknown`), `gap` and `interval`. Empty if there
        is no common training loss.
    """
    if not comparison.is_matched:
        return []
    at = comparison.headline
    return [
        {
            "label": measured.architecture,
            "verdict": _verdict(measured.gap, at),
            "gap": signed(measured.gap.value[at]).text,
            "interval": _interval(measured.gap, at),
        }
        for measured in comparison.select("test")[1:]
    ]


def summary_lines(comparison: Comparison) -> list[str]:
    """Return a summary of the comparison for the terminal, in lines."""
    num_runs = sum(len(architecture.runs) for architecture in comparison.architectures)
    architectures = f"{num_runs} runs of {len(comparison.architectures)} architectures"
    lines = [f"compared: {architectures}, with {comparison.baseline.label}"]
    if len(comparison.architectures) == 1:
        return [*lines, "one architecture: there is nothing to compare it with"]
    if not comparison.is_matched:
        return [*lines, describe_unmatched(comparison)]
    lines.append(f"out of domain at a training loss of {number(comparison.training_losses[comparison.headline]).text}:")
    for entry in verdicts(comparison):
        label, verdict, gap, interval = (entry[key] for key in ("label", "verdict", "gap", "interval"))
        words = {"same": "no significant difference", "unknown": "unknown difference"}.get(verdict, f"{verdict} loss")
        precision = f"95 % interval {interval}" if interval else "no interval: fewer than 3 documents"
        lines.append(f"  {label}: {words} ({gap} nats per token, {precision})")
    return lines


def _verdict(gap: Estimate, at: int) -> str:
    """Return `higher` or `lower` by the sign of the gap's interval, `same` if it contains zero, else `unknown`."""
    if math.isnan(gap.low[at]):
        return "unknown"
    if gap.low[at] > 0:
        return "higher"
    return "lower" if gap.high[at] < 0 else "same"


def _interval(gap: Estimate, at: int) -> str:
    """Format the interval of a gap; empty with too few documents."""
    if math.isnan(gap.low[at]):
        return ""
    return f"{signed(gap.low[at]).text} to {signed(gap.high[at]).text}"


def _gap_cell(gap: Estimate, at: int, *, is_baseline: bool) -> Cell:
    return BASELINE_CELL if is_baseline else Cell(signed(gap.value[at]).text, gap.value[at], _interval(gap, at))


def headline_table(comparison: Comparison) -> Table:
    """Return a table of losses and gaps at the lowest common training loss, with a row per architecture."""
    at, splits = comparison.headline, evaluated_splits(comparison)
    has_seeds = any(len(architecture.runs) > 1 for architecture in comparison.architectures)
    columns = ["architecture"]
    for split in splits:
        columns += [
            f"loss {SPLITS[split]}",
            "gap (95\u00a0% interval)",
            *(["standard deviation over seeds"] if has_seeds else []),
        ]
    rows = []
    for index, architecture in enumerate(comparison.architectures):
        num_seeds = len(architecture.runs)
        row = [text(architecture.label, f"{num_seeds} seeds" if num_seeds > 1 else "")]
        for split in splits:
            measured = comparison.select(split)[index]
            row += [number(measured.loss.value[at]), _gap_cell(measured.gap, at, is_baseline=index == 0)]
            row += [number(measured.seed_spread[at])] if has_seeds else []
        rows.append(row)
    level, baseline = number(comparison.training_losses[at]).text, comparison.baseline.label
    caption = f"Training loss {level}; all values in nats per token; gap: loss minus that of {baseline}"
    return Table(caption, columns, rows)


def precision_table(comparison: Comparison, resolution: float) -> Table:
    """Return a table of the standard errors of out-of-domain gaps, and of the documents needed to detect a gap."""
    at = comparison.headline
    rows = [
        [
            text(measured.architecture),
            number(measured.gap.error[at]),
            number(measured.gap.document_error[at]),
            count(measured.documents),
            NOTHING if (needed := measured.documents_needed(at)) is None else count(needed),
        ]
        for measured in comparison.select("test")[1:]
    ]
    columns = ["architecture", "standard error", "standard error from documents alone", "documents scored"]
    columns.append(f"documents needed to detect a gap of {resolution} nats")
    return Table("Out-of-domain gap, nats per token", columns, rows)


def level_table(comparison: Comparison) -> Table:
    """Return a table of the baseline's out-of-domain loss and the gaps to it, with a row per training loss."""
    baseline, *others = comparison.select("test")
    rows = [
        [
            number(comparison.training_losses[level]),
            number(baseline.loss.value[level]),
            *(_gap_cell(other.gap, level, is_baseline=False) for other in others),
        ]
        for level in comparison.levels
    ]
    caption = (
        f"Loss of {comparison.baseline.label}, and the others' gap to it, at matched training loss; nats per token"
    )
    columns = ["training loss", baseline.architecture, *(other.architecture for other in others)]
    return Table(caption, columns, rows, highlighted=comparison.levels.index(comparison.headline), notes_below=True)


def domain_table(comparison: Comparison) -> Table:
    """Return a table of losses and gaps at the headline level, with a row per domain and architecture.

    Domains have a fixed order, and the baseline is the first row of each domain.
    """
    at = comparison.headline
    rows = []
    for split in SPLITS:
        names = dict.fromkeys(measured.domain for measured in comparison.measured if measured.split == split)
        for name in (name for name in names if name != ALL_DOMAINS):
            for index, measured in enumerate(comparison.select(split, name)):
                labels = text(name), text(SPLITS[split]), text(measured.architecture)
                loss, gap = number(measured.loss.value[at]), _gap_cell(measured.gap, at, is_baseline=index == 0)
                rows.append([*labels, loss, gap, count(measured.documents), count(measured.tokens)])
    caption = f"At training loss {number(comparison.training_losses[at]).text}; losses in nats per token"
    columns = ["domain", "split", "architecture", "loss", "gap (95\u00a0% interval)", "documents", "tokens"]
    return Table(caption, columns, rows)


def small_domains(comparison: Comparison) -> Sequence[str]:
    """Return the domains with too few documents for a reliable interval."""
    small = {measured.domain for measured in comparison.measured if measured.documents < FEW_DOCUMENTS}
    return sorted(small - {ALL_DOMAINS})
