"""HTML page of a report, with embedded figures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from megatron_ext.analysis.architecture import Architecture, mixer_label
from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, decimal, number, text
from megatron_ext.analysis.choice_output import choice_table
from megatron_ext.analysis.choices import Choices
from megatron_ext.analysis.class_gaps import class_tables
from megatron_ext.analysis.decisions import RunDecisions, data_differences, decision_counts, decision_table, slow_table
from megatron_ext.analysis.findings import (
    MATCHED,
    claim_entries,
    density_warning,
    describe_seeds,
    describe_unmatched,
    verdicts,
)
from megatron_ext.analysis.history import differences, history_row, read_skipped
from megatron_ext.analysis.matched import RESOLUTION, Comparison
from megatron_ext.analysis.matched_runs import training_loss
from megatron_ext.analysis.matched_tables import (
    domain_table,
    evaluated_splits,
    headline_table,
    level_table,
    precision_table,
    range_table,
    small_domains,
)
from megatron_ext.analysis.run_files import SPLITS
from megatron_ext.analysis.run_texts import epoch_warnings, epochs, text_warnings
from megatron_ext.analysis.runs import Run
from megatron_ext.analysis.scaling.section import Scaling
from megatron_ext.analysis.style import DARK, DPI, LIGHT, MAX_LEGEND, Picture, png_width, short_count, styles
from megatron_ext.analysis.suites import (
    HeatMap,
    Suites,
    few_documents,
    fewshot_table,
    heat_maps,
    loss_table,
    retrieval_table,
)
from megatron_ext.utils.ratio_interval import FEW_DOCUMENTS

SECTIONS = {
    "curves": "Loss over tokens",
    "matched": "At matched loss",
    "shift": "Out of domain less in domain",
    "levels": "Out of domain during training",
    "choices": "Chosen by validation loss",
    "domains": "By domain",
    "classes": "By class of token",
    "losses": "Test loss by domain",
    "retrieval": "Retrieval by length",
    "fewshot": "Few-shot",
    "scaling": "Scaling laws",
    "runs": "Runs",
    "configurations": "Configuration differences",
    "history": "History of each run",
    "skipped": "Skipped shards",
    "definitions": "Definitions",
    "files": "Files",
}
"""Section titles by anchor, in the order of the page. A page omits sections without content."""


REM_PER_INCH = 6.2
"""Displayed width of a figure in rem per inch."""

MAX_ROWS = 12
"""Number of rows above which a secondary table is collapsed."""


@dataclass(frozen=True)
class Contents:
    """Contents of a page.

    Attributes:
        comparison: comparison at matched training loss.
        matched: figure of the comparison.
        shift: figure of out-of-domain loss less in-domain loss; None without in-domain evaluations.
        choices: fields that were chosen by validation loss.
        choice_figures: figures of validation loss over the values of these fields.
        curves: figures of training loss and of loss by domain.
        suites: results of the test suites.
        scaling: scaling laws; None: not requested.
        run_decisions: decisions of the runs about failed steps, those of the baseline first.
        files: names of the other files of the report.
        excluded: one sentence for each run that is not compared, with the reason.
    """

    comparison: Comparison
    matched: Picture
    shift: Picture | None
    choices: Choices
    choice_figures: Sequence[Picture]
    curves: Sequence[Picture]
    suites: Sequence[Suites]
    scaling: Scaling | None
    run_decisions: Sequence[RunDecisions]
    files: Sequence[str]
    excluded: Sequence[str] = ()

    @property
    def runs(self) -> list[tuple[Architecture, Run]]:
        """All runs with their architectures, those of the baseline first."""
        return [(architecture, run) for architecture in self.comparison.architectures for run in architecture.runs]


def render_page(contents: Contents) -> str:
    """Render index.html with embedded figures for wide and narrow screens, in light and dark themes."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("megatron_ext.analysis").joinpath("report.html.j2").read_text(encoding="utf-8")
    comparison, suites = contents.comparison, contents.suites
    tables = _tables(contents)
    present = {"curves", "definitions", "files"} | {name for name, table in tables.items() if table is not None}
    present |= {"scaling"} if contents.scaling else set()
    present |= {"shift"} if contents.shift else set()
    listed_runs = [run for _, run in contents.runs]
    return environment.from_string(source).render(
        titles={anchor: title for anchor, title in SECTIONS.items() if anchor in present},
        compared=_describe_runs(contents),
        baseline=comparison.baseline.label,
        several_baselines=len([group for group in comparison.groups if group.others]) > 1,
        single=len(comparison.architectures) == 1,
        text_differences=[*text_warnings(listed_runs), *epoch_warnings(listed_runs)],
        choice_warnings=contents.choices.warnings,
        choice_figures=[_render_picture(picture) for picture in contents.choice_figures],
        excluded=contents.excluded,
        data_differences=data_differences(contents.run_decisions),
        claims=claim_entries(comparison),
        verdicts=verdicts(comparison),
        max_listed=MAX_LEGEND,
        max_rows=MAX_ROWS,
        by_mixer=styles(comparison.architectures, LIGHT).shares_legend,
        window=comparison.window,
        match=comparison.match,
        matched_name=MATCHED[comparison.match],
        seeds=describe_seeds(comparison),
        family=bool(comparison.family),
        density=density_warning(comparison),
        unmatched=describe_unmatched(comparison),
        matched=_render_picture(contents.matched),
        shift=_render_picture(contents.shift) if contents.shift else None,
        curves=[_render_picture(picture) for picture in contents.curves],
        tables=tables,
        heat_maps=[_render_heat_map(heat_map) for heat_map in heat_maps(suites)],
        scaling=contents.scaling,
        scaling_pictures=[_render_picture(picture) for picture in contents.scaling.pictures]
        if contents.scaling
        else [],
        few_documents=small_domains(comparison),
        few_tested=few_documents(suites),
        few=FEW_DOCUMENTS,
        resolution=RESOLUTION,
        in_domain_test="test_in_domain" in evaluated_splits(comparison),
        files=contents.files,
    )


def _tables(contents: Contents) -> dict[str, Table | None]:
    """Return the tables by anchor of their section; None for an empty table."""
    comparison, suites = contents.comparison, contents.suites
    runs = [run for _architecture, run in contents.runs]
    classes = class_tables(comparison)
    tables = _matched_tables(comparison) | {
        "choices": choice_table(contents.choices),
        "classes": classes["test"],
        "classes_in_domain": classes["validation"],
        "losses": loss_table(suites),
        "retrieval": retrieval_table(suites),
        "fewshot": fewshot_table(suites),
        "runs": _run_table(contents),
        "configurations": _difference_table(runs),
        "history": _history_table(contents.run_decisions),
        "decisions": decision_table(contents.run_decisions),
        "slow": slow_table(contents.run_decisions),
        "skipped": _skipped_table(runs),
    }
    return {name: table if table.rows and len(table.columns) > 1 else None for name, table in tables.items()}


def _matched_tables(comparison: Comparison) -> dict[str, Table]:
    if not comparison.is_matched:
        return dict.fromkeys(("precision", "levels", "domains"), Table("", [], [])) | {
            "matched": range_table(comparison)
        }
    return {
        "matched": headline_table(comparison),
        "precision": precision_table(comparison, RESOLUTION),
        "levels": level_table(comparison),
        "domains": domain_table(comparison),
    }


def _describe_runs(contents: Contents) -> dict[str, str]:
    """Return a short description of the compared runs, by item."""
    runs = [run for _architecture, run in contents.runs]
    first, architectures = runs[0], contents.comparison.architectures
    mixers = dict.fromkeys(mixer_label(architecture.runs[0]) for architecture in architectures)
    return {
        "runs": _plural(len(runs), "run"),
        "architectures": _plural(len(architectures), "architecture"),
        "mixers": ", ".join(mixers),
        "parameters": _range([run.size.parameters for run in runs if run.size]),
        "tokens": _range([int(run.tokens[-1]) for run in runs]),
        "lengths": _range([run.config["data"]["seq_length"] for run in runs if run.config.get("data")]),
        "train": ", ".join(_trained_on(first)),
        "test": ", ".join(domain.domain for domain in first.split("test")),
    }


def _trained_on(run: Run) -> list[str]:
    """Return the training domains of the configuration, else the domains of the validation split."""
    domains = run.config.get("data", {}).get("train_domains")
    return domains or [domain.domain for domain in run.split("validation")]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _range(values: Sequence[int]) -> str:
    if not values:
        return ""
    low, high = (short_count(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _run_table(contents: Contents) -> Table:
    """Return a table of all runs with their losses at the last evaluation."""
    comparison = contents.comparison
    splits = evaluated_splits(comparison)
    rows = []
    for architecture, run in contents.runs:
        last = int(run.evaluation_steps[-1])
        tokens = int(run.tokens[np.searchsorted(run.steps, last)])
        passes = epochs(run)
        row = [text(run.name), text(architecture.label), Cell(str(run.seed), run.seed), count(last), count(tokens)]
        row += [number(training_loss(run, comparison.window)[-1]), NOTHING if passes is None else decimal(passes)]
        rows.append(row + [number(run.split_loss(split)[-1]) for split in splits])
    columns = ["run", "architecture", "seed", "step", "tokens", "training loss", "epochs"]
    caption = "At each run's own last evaluation, so not at matched training loss; losses in nats per token"
    return Table(caption, [*columns, *(f"loss {SPLITS[split]}" for split in splits)], rows)


def _difference_table(runs: Sequence[Run]) -> Table:
    fields, values = differences(runs)
    rows = [[text(run.name), *cells] for run, cells in zip(runs, values, strict=True)]
    return Table("Configuration fields in which any two runs differ", ["run", *fields], rows)


def _history_table(run_decisions: Sequence[RunDecisions]) -> Table:
    """Return the history table without empty columns."""
    cells = [history_row(entry.run) | decision_counts(entry) for entry in run_decisions]
    columns = [name for name in cells[0] if any(row[name] != NOTHING for row in cells)]
    rows = [
        [text(entry.run.name), *(row[name] for name in columns)]
        for entry, row in zip(run_decisions, cells, strict=True)
    ]
    caption = (
        "Time covers the optimizer steps, without evaluations and checkpoints; memory is the maximum over all steps"
    )
    return Table(caption, ["run", *columns], rows)


def _skipped_table(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        for step_range in read_skipped(run):
            record = step_range.record
            steps = [count(record.step), NOTHING if step_range.until is None else count(step_range.until)]
            samples = Cell(
                f"{count(record.samples_an_epoch).text} of {count(record.of_samples).text}", record.samples_an_epoch
            )
            shards = text("; ".join(shard.problem for shard in record.shards))
            rows.append([text(run.name), *steps, count(len(record.shards)), count(record.tokens), samples, shards])
    columns = ["run", "from step", "until step", "shards", "tokens", "samples left per epoch", "problems"]
    return Table("Data that could not be read and was skipped", columns, rows)


def _render_picture(picture: Picture) -> dict[str, Any]:
    images = {
        f"{'narrow_' if stacked else ''}{name}": _data_uri(picture.draw(theme, stacked))
        for name, theme in (("light", LIGHT), ("dark", DARK))
        for stacked in (False, True)
    }
    return {"alt": picture.alt, "rem": _width_in_rem(picture.draw(LIGHT, False)), **images}


def _render_heat_map(heat_map: HeatMap) -> dict[str, Any]:
    return {"title": heat_map.title, "picture": _data_uri(heat_map.png), "rem": _width_in_rem(heat_map.png)}


def _width_in_rem(picture: bytes) -> float:
    """Return the maximum displayed width of a figure in rem, which gives text the same size in all figures.

    The width is limited to that of the page.
    """
    return round(min(png_width(picture) / DPI * REM_PER_INCH, 62.0), 1)


def _data_uri(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
