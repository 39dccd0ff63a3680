"""The report of a comparison: a picture, a tidy table and one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from megatron_ext.analysis.architecture import Architecture
from megatron_ext.analysis.figure import DARK, LIGHT, draw, split_loss
from megatron_ext.analysis.matched import (
    ALL_DOMAINS,
    RESOLUTION,
    Comparison,
    Estimate,
    Measured,
    compare,
    training_loss,
)
from megatron_ext.analysis.runs import Run, Split, read_runs
from megatron_ext.analysis.suites import (
    Suites,
    fewshot_table,
    heat_maps,
    intervals,
    read_suites,
    retrieval_table,
    to_dict,
)
from megatron_ext.errors import UserError
from megatron_ext.files import write_whole

RESAMPLES = 1000
FEW_DOCUMENTS = 20
"""Below this a bootstrap interval is known to be too narrow, and the page says so."""

MINUS = "\u2212"
NOTHING = "\u2013"
SPLITS: dict[Split, str] = {"test": "out of domain", "validation": "in domain", "test_in_domain": "in domain test"}

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
"""Columns of matched_loss.csv: a row an architecture, domain (or all) and training loss; losses in nats a token;
documents_needed: to tell a gap of `RESOLUTION` from none."""


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Compare runs at matched training loss and write matched_loss.png, matched_loss.csv and index.html.

    The page also shows what the suites retrieval and fewshot found of runs that were put to them, each at its newest
    step; then suites.json holds the numbers.

    Files of an earlier report in `output` are replaced, each at once; nothing is written if the runs cannot be
    compared.

    Args:
        run_dirs: run folders; those that differ in training.seed alone count as one architecture.
        output: folder of the report; made if it is not there.

    Returns:
        The path of index.html.

    Raises:
        UserError: a run folder is missing or damaged, the runs do not compare, or the output cannot be written.
    """
    comparison = compare(read_runs(run_dirs), resamples=RESAMPLES)
    picture = draw(comparison)
    suites = read_suites(comparison.architectures)
    page = render_page(comparison, picture, suites)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / "matched_loss.png", picture)
        write_whole(output / "matched_loss.csv", render_table(comparison).encode())
        if suites:
            write_whole(output / "suites.json", (json.dumps(to_dict(suites), indent=1) + "\n").encode())
        else:
            (output / "suites.json").unlink(missing_ok=True)  # it would be that of an earlier report
        write_whole(output / "index.html", page.encode())
    except OSError as error:
        problem = f"the report cannot be written ({error.strerror})"
        raise UserError(str(output), problem, "give another folder with --output or make room") from None
    return output / "index.html"


def render_table(comparison: Comparison) -> str:
    """matched_loss.csv: every architecture and domain at every tabulated training loss, see `COLUMNS`."""
    seeds = {one.label: len(one.runs) for one in comparison.architectures}
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in comparison.measured:
        for level in comparison.levels:
            writer.writerow(_csv_row(one, level, comparison, seeds[one.architecture]))
    return stream.getvalue()


def _csv_row(one: Measured, level: int, comparison: Comparison, seeds: int) -> list[Any]:
    loss, gap = one.loss, one.gap
    split = SPLITS[one.split].replace(" ", "_")
    x = comparison.training_losses[level]
    estimates = [e[level] for e in (loss.value, loss.error, loss.low, loss.high)]
    estimates += [e[level] for e in (gap.value, gap.error, gap.document_error, gap.low, gap.high)]
    numbers = [f"{value:.6f}" for value in estimates]
    spread = "" if math.isnan(one.seed_spread[level]) else f"{one.seed_spread[level]:.6f}"
    headline = str(level == comparison.headline).lower()
    names = [one.architecture, split, one.domain, f"{x:.6f}", headline]
    return [*names, *numbers, seeds, spread, one.documents, one.tokens, one.documents_needed(level)]


def render_page(comparison: Comparison, picture: bytes, suites: Sequence[Suites] = ()) -> str:
    """index.html with its pictures inside: for wide and narrow screens, light and dark.

    Args:
        comparison: what to report.
        picture: the plot as PNG for a wide, light screen.
        suites: what other tests found.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("megatron_ext.analysis").joinpath("report.html.j2").read_text(encoding="utf-8")
    single = len(comparison.architectures) == 1
    return environment.from_string(source).render(
        baseline=comparison.baseline.label,
        single=single,
        window=comparison.window,
        resamples=RESAMPLES,
        resolution=RESOLUTION,
        matched_at=_number(comparison.training_losses[comparison.headline]),
        pictures={
            "light": _data_uri(picture),
            "dark": _data_uri(draw(comparison, DARK)),
            "narrow_light": _data_uri(draw(comparison, LIGHT, stacked=True)),
            "narrow_dark": _data_uri(draw(comparison, DARK, stacked=True)),
        },
        splits=[(split, SPLITS[split]) for split in SPLITS if comparison.select(split)],
        headline=_headline(comparison),
        levels=_levels(comparison),
        domains=_domains(comparison),
        heat_maps=heat_maps(suites),
        retrieval=retrieval_table(suites),
        retrieval_intervals=intervals(suites),
        fewshot=fewshot_table(suites),
        several_seeds=any(len(one.runs) > 1 for one in comparison.architectures),
        few_documents=_small_domains(comparison),
        few=FEW_DOCUMENTS,
        runs=[_run_row(one, run, comparison.window) for one in comparison.architectures for run in one.runs],
    )


def _data_uri(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")


def _headline(comparison: Comparison) -> list[dict[str, Any]]:
    """A row an architecture: its losses and gaps at the lowest common training loss."""
    at = comparison.headline
    rows = []
    for index, one in enumerate(comparison.architectures):
        cells = {}
        for split in SPLITS:
            measured = comparison.select(split)
            if measured:
                cells[split] = _cell(measured[index], at, is_baseline=index == 0)
        rows.append({"label": one.label, "seeds": len(one.runs), "splits": cells})
    return rows


def _cell(one: Measured, at: int, *, is_baseline: bool) -> dict[str, str]:
    gap = one.gap
    return {
        "loss": _number(one.loss.value[at]),
        "spread": _number(one.seed_spread[at]),
        "gap": "baseline" if is_baseline else _signed(gap.value[at]),
        "error": "" if is_baseline else _number(gap.error[at]),
        "document_error": "" if is_baseline else _number(gap.document_error[at]),
        "interval": "" if is_baseline else f"{_signed(gap.low[at])} to {_signed(gap.high[at])}",
        "verdict": "" if is_baseline else _verdict(gap, at),
        "documents": _count(one.documents),
        "documents_needed": "" if is_baseline else _count(one.documents_needed(at)),
    }


def _verdict(gap: Estimate, at: int) -> str:
    """Which way the interval lies; `same` where it holds zero."""
    if gap.low[at] > 0:
        return "higher"
    return "lower" if gap.high[at] < 0 else "same"


def _levels(comparison: Comparison) -> list[dict[str, Any]]:
    """A row a tabulated training loss: the baseline's out-of-domain loss and everyone's gap to it."""
    measured = comparison.select("test")
    return [
        {
            "training_loss": _number(comparison.training_losses[level]),
            "headline": level == comparison.headline,
            "cells": [_cell(one, level, is_baseline=index == 0) for index, one in enumerate(measured)],
        }
        for level in comparison.levels
    ]


def _domains(comparison: Comparison) -> list[dict[str, Any]]:
    """A row a domain and architecture at the headline level, domains in a fixed order, the baseline first in each."""
    rows = []
    for split in SPLITS:
        names = dict.fromkeys(one.domain for one in comparison.measured if one.split == split)
        for name in [name for name in names if name != ALL_DOMAINS]:
            measured = comparison.select(split, name)
            cells = [
                {"label": one.architecture, **_cell(one, comparison.headline, is_baseline=index == 0)}
                for index, one in enumerate(measured)
            ]
            size = {"documents": _count(measured[0].documents), "tokens": _count(measured[0].tokens)}
            rows.append({"domain": name, "split": SPLITS[split], "cells": cells, **size})
    return rows


def _small_domains(comparison: Comparison) -> list[str]:
    few = {one.domain for one in comparison.measured if one.documents < FEW_DOCUMENTS}
    return sorted(few - {ALL_DOMAINS})


def _run_row(one: Architecture, run: Run, window: int) -> dict[str, Any]:
    """What a reader wants to know of a run, at its last evaluation."""
    rates = run.tokens_per_second[np.isfinite(run.tokens_per_second)]
    last = int(run.evaluation_steps[-1])
    return {
        "name": run.name,
        "label": one.label,
        "seed": run.seed,
        "steps": _count(last),
        "tokens": _count(int(run.tokens[np.searchsorted(run.steps, last)])),
        "training_loss": _number(training_loss(run, window)[-1]),
        "splits": {split: _number(split_loss(run, split)[-1]) for split in SPLITS if run.split(split)},
        "rate": _count(round(float(np.median(rates)))) if rates.size else NOTHING,
    }


def _number(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.4f}".replace("-", MINUS)


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", MINUS)


def _count(value: int) -> str:
    return f"{value:,}".replace(",", "\u202f")
