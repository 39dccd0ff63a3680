"""Output files of retrieval tests: all answers as JSON, mean scores as tables and as a figure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from megatron_ext.evaluation.retrieval.results import CONFIDENCE, RetrievalResults, Summary
from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.markdown import csv_row, table

SCHEMA = "selectron.retrieval.1"
"""Schema of retrieval.json. Its fields besides the description of the model: `schema`, `options`, `haystack`,
`max_length` (of the model, in tokens), `confidence`, `by_length` and `by_depth` (lists of `Summary`), `records` (a list
of `Record`) and `skipped` (a list of `Skipped`). Scores are from 0 to 1."""

STEM = "retrieval"


def write_results(results: RetrievalResults, about: dict[str, Any], folder: Path) -> None:
    """Write retrieval.json, .csv, .md and, if anything was tested, .png, each atomically.

    Args:
        results: results to write.
        about: description of the model for the JSON file.
        folder: an existing folder. Files of an earlier test in it are replaced.
    """
    picture = folder / f"{STEM}.png"
    if results.records:
        from megatron_ext.evaluation.retrieval.figure import draw  # imports matplotlib, which training does not need

        write_atomically(picture, draw(results))
    else:
        picture.unlink(missing_ok=True)  # a figure of an earlier test
    texts = {
        "md": markdown(results),
        "csv": to_csv(results),
        "json": json.dumps({**about, **to_dict(results)}, indent=1) + "\n",
    }
    for suffix, text in texts.items():
        write_atomically(folder / f"{STEM}.{suffix}", text.encode())


def to_dict(results: RetrievalResults) -> dict[str, Any]:
    """Return the results with the fields of `SCHEMA`."""
    return {
        "schema": SCHEMA,
        "options": asdict(results.options),
        "haystack": results.haystack,
        "max_length": results.max_length,
        "confidence": CONFIDENCE,
        "by_length": [asdict(summary) for summary in results.by_length()],
        "by_depth": [asdict(summary) for summary in results.by_depth()],
        "skipped": [asdict(entry) for entry in results.skipped],
        "records": [asdict(record) for record in results.records],
    }


def to_csv(results: RetrievalResults) -> str:
    """Return a CSV table with a row per task, length and depth; the depth is empty for a task without one."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([field.name for field in fields(Summary)])
    writer.writerows(
        csv_row("" if cell is None else cell for cell in astuple(summary)) for summary in results.by_depth()
    )
    return buffer.getvalue()


def markdown(results: RetrievalResults) -> str:
    """Return a Markdown table of tasks by lengths, followed by a list of what was skipped."""
    options = results.options
    lengths = sorted(options.lengths)
    summaries = {(summary.task, summary.length): summary for summary in results.by_length()}
    rows = [[task, *(_cell(summaries.get((task, length))) for length in lengths)] for task in options.tasks]
    lines = [
        f"Mean scores in per cent, with Wilson's interval of {100 * CONFIDENCE:.0f} %; {options.samples} samples per "
        f"task, length and depth; depths {', '.join(f'{100 * depth:.3g} %' for depth in options.depths)}; "
        f"haystack: {results.haystack}; seed {options.seed}.",
        "",
        *table(["task", *(f"{length} tokens" for length in lengths)], rows),
        *_skipped_lines(results),
    ]
    return "\n".join(lines) + "\n"


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return "\u2013"
    return f"{100 * summary.score:.1f} ({100 * summary.low:.1f} to {100 * summary.high:.1f})"


def _skipped_lines(results: RetrievalResults) -> Sequence[str]:
    lines = [f"* {entry.task} at {entry.length} tokens: {entry.reason}" for entry in results.skipped]
    return ["", "Not tested:", "", *lines] if lines else []
