"""Tables and text summary of a comparison at matched training loss."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, number, signed, text
from megatron_ext.analysis.matched import ALL_DOMAINS, Comparison, Estimate, Measured, training_loss
from megatron_ext.analysis.run_files import SPLITS, FloatArray, Split, column_name
from megatron_ext.utils.markdown import csv_row
from megatron_ext.utils.ratio_interval import FEW_DOCUMENTS

BASELINE = Cell("baseline", 0.0)

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
    seeds = {one.label: len(one.runs) for one in comparison.architectures}
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in comparison.measured:
        for level in comparison.levels:
            writer.writerow(csv_row(_csv_row(one, level, comparison, seeds[one.architecture])))
    return stream.getvalue()


def _csv_row(one: Measured, level: int, comparison: Comparison, seeds: int) -> list[Any]:
    loss, gap = one.loss, one.gap
    x = comparison.training_losses[level]
    estimates = [e[level] for e in (loss.value, loss.error, loss.low, loss.high)]
    estimates += [e[level] for e in (gap.value, gap.error, gap.document_error, gap.low, gap.high)]
    numbers = ["" if math.isnan(value) else f"{value:.6f}" for value in estimates]
    spread = "" if math.isnan(one.seed_spread[level]) else f"{one.seed_spread[level]:.6f}"
    headline = str(level == comparison.headline).lower()
    names = [one.architecture, column_name(one.split), one.domain, f"{x:.6f}", headline]
    needed = one.documents_needed(level)
    return [*names, *numbers, seeds, spread, one.documents, one.tokens, "" if needed is None else needed]


def splits_of(comparison: Comparison) -> list[Split]:
    """Return the evaluated splits in the order of display."""
    return [split for split in SPLITS if comparison.select(split)]


def unmatched(comparison: Comparison) -> str:
    """Describe two runs without a common training loss, as a sentence without the full stop; empty if all have one."""
    if comparison.is_matched:
        return ""
    ranges = [(run, training_loss(run, comparison.window)) for one in comparison.architectures for run in one.runs]
    highest, above = max(ranges, key=lambda pair: float(pair[1].min()))
    lowest, below = min(ranges, key=lambda pair: float(pair[1].max()))
    return (
        "The runs have no training loss in common, so nothing is compared at matched training loss: "
        f"{highest.name} was evaluated at training losses of {_range(above)}, {lowest.name} at {_range(below)}; "
        f"train {highest.name} longer, or evaluate {lowest.name} earlier"
    )


def _range(losses: FloatArray) -> str:
    return f"{number(float(losses.max())).text} to {number(float(losses.min())).text}"


def range_table(comparison: Comparison) -> Table:
    """Return a table with the range of each run's training losses at its evaluations."""
    rows = []
    for one in comparison.architectures:
        for run in one.runs:
            losses = training_loss(run, comparison.window)
            rows.append([text(run.name), text(one.label), number(float(losses.max())), number(float(losses.min()))])
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
            "label": one.architecture,
            "verdict": _verdict(one.gap, at),
            "gap": signed(one.gap.value[at]).text,
            "interval": _interval(one, at),
        }
        for one in comparison.select("test")[1:]
    ]


def answer_lines(comparison: Comparison) -> list[str]:
    """Return a summary of the comparison for the terminal, in lines."""
    runs = sum(len(one.runs) for one in comparison.architectures)
    architectures = f"{runs} runs of {len(comparison.architectures)} architectures"
    lines = [f"compared: {architectures}, with {comparison.baseline.label}"]
    if len(comparison.architectures) == 1:
        return [*lines, "one architecture: there is nothing to compare it with"]
    if not comparison.is_matched:
        return [*lines, unmatched(comparison)]
    lines.append(f"out of domain at a training loss of {number(comparison.training_losses[comparison.headline]).text}:")
    for one in verdicts(comparison):
        interval = f"95 % interval {one['interval']}" if one["interval"] else "no interval: fewer than 3 documents"
        verdict = {"same": "no significant difference", "unknown": "unknown difference"}.get(
            one["verdict"], f"{one['verdict']} loss"
        )
        lines.append(f"  {one['label']}: {verdict} ({one['gap']} nats per token, {interval})")
    return lines


def _verdict(gap: Estimate, at: int) -> str:
    """Return `higher` or `lower` by the sign of the gap's interval, `same` if it contains zero, else `unknown`."""
    if math.isnan(gap.low[at]):
        return "unknown"
    if gap.low[at] > 0:
        return "higher"
    return "lower" if gap.high[at] < 0 else "same"


def _interval(one: Measured, at: int) -> str:
    """Format the interval of a gap; empty with too few documents."""
    if math.isnan(one.gap.low[at]):
        return ""
    return f"{signed(one.gap.low[at]).text} to {signed(one.gap.high[at]).text}"


def _gap(one: Measured, at: int, *, is_baseline: bool) -> Cell:
    return BASELINE if is_baseline else Cell(signed(one.gap.value[at]).text, one.gap.value[at], _interval(one, at))


def headline_table(comparison: Comparison) -> Table:
    """Return a table of losses and gaps at the lowest common training loss, with a row per architecture."""
    at, splits = comparison.headline, splits_of(comparison)
    several = any(len(one.runs) > 1 for one in comparison.architectures)
    columns = ["architecture"]
    for split in splits:
        columns += [
            f"loss {SPLITS[split]}",
            "gap (95\u00a0% interval)",
            *(["standard deviation over seeds"] if several else []),
        ]
    rows = []
    for index, one in enumerate(comparison.architectures):
        row = [text(one.label, f"{len(one.runs)} seeds" if len(one.runs) > 1 else "")]
        for split in splits:
            measured = comparison.select(split)[index]
            row += [number(measured.loss.value[at]), _gap(measured, at, is_baseline=index == 0)]
            row += [number(measured.seed_spread[at])] if several else []
        rows.append(row)
    level, baseline = number(comparison.training_losses[at]).text, comparison.baseline.label
    caption = f"Training loss {level}; all values in nats per token; gap: loss minus that of {baseline}"
    return Table(caption, columns, rows)


def precision_table(comparison: Comparison, resolution: float) -> Table:
    """Return a table of the standard errors of out-of-domain gaps, and of the documents needed to detect a gap."""
    at, measured = comparison.headline, comparison.select("test")
    rows = [
        [
            text(one.architecture),
            number(one.gap.error[at]),
            number(one.gap.document_error[at]),
            count(one.documents),
            NOTHING if (needed := one.documents_needed(at)) is None else count(needed),
        ]
        for one in measured[1:]
    ]
    columns = ["architecture", "standard error", "standard error from documents alone", "documents scored"]
    needed_for = f"documents needed to detect a gap of {resolution} nats"
    return Table("Out-of-domain gap, nats per token", [*columns, needed_for], rows)


def level_table(comparison: Comparison) -> Table:
    """Return a table of the baseline's out-of-domain loss and the gaps to it, with a row per training loss."""
    measured = comparison.select("test")
    rows = [
        [
            number(comparison.training_losses[level]),
            number(measured[0].loss.value[level]),
            *(_gap(one, level, is_baseline=False) for one in measured[1:]),
        ]
        for level in comparison.levels
    ]
    caption = (
        f"Loss of {comparison.baseline.label}, and the others' gap to it, at matched training loss; nats per token"
    )
    columns = ["training loss", *(one.architecture for one in measured)]
    return Table(caption, columns, rows, marked=comparison.levels.index(comparison.headline), below=True)


def domain_table(comparison: Comparison) -> Table:
    """Return a table of losses and gaps at the headline level, with a row per domain and architecture.

    Domains have a fixed order, and the baseline is the first row of each domain.
    """
    at = comparison.headline
    rows = []
    for split in SPLITS:
        names = dict.fromkeys(one.domain for one in comparison.measured if one.split == split)
        for name in (name for name in names if name != ALL_DOMAINS):
            for index, one in enumerate(comparison.select(split, name)):
                sizes = count(one.documents), count(one.tokens)
                loss, gap = number(one.loss.value[at]), _gap(one, at, is_baseline=index == 0)
                rows.append([text(name), text(SPLITS[split]), text(one.architecture), loss, gap, *sizes])
    caption = f"At training loss {number(comparison.training_losses[at]).text}; losses in nats per token"
    columns = ["domain", "split", "architecture", "loss", "gap (95\u00a0% interval)", "documents", "tokens"]
    return Table(caption, columns, rows)


def small_domains(comparison: Comparison) -> Sequence[str]:
    """Return the domains with too few documents for a reliable interval."""
    few = {one.domain for one in comparison.measured if one.documents < FEW_DOCUMENTS}
    return sorted(few - {ALL_DOMAINS})
