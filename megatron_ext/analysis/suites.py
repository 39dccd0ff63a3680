"""Results of the test suites in run folders (domains, retrieval, fewshot), prepared for the report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count as counter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.analysis.architecture import Architecture
from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, number, text
from megatron_ext.analysis.run_files import SPLITS, Split, column_name
from megatron_ext.analysis.style import as_csv
from megatron_ext.run_folder.layout import EVALUATIONS, parse_step_name
from megatron_ext.utils.atomic_files import os_error_reason, read_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.ratio_interval import FEW_DOCUMENTS

_HINT = "run `selectron evaluate` again"
_MAX_PICTURE_BYTES = 1 << 26
File = TypeVar("File")
_FILE = ConfigDict(extra="ignore")

LOSS_COLUMNS = ("documents", "tokens", "loss", "loss_low", "loss_high", "nats_per_byte", "bits_per_byte")
"""Columns of domains.csv after those of run, split and domain; losses in nats per token."""
SCORE_COLUMNS = ("task", "length", "depth", "samples", "score", "low", "high")
"""Columns of retrieval.csv after those of the run. A row with an empty depth is a mean over all depths."""
METRIC_COLUMNS = ("name", "filter", "value", "stderr")
"""Columns of fewshot.csv after those of run and task."""


@checked_dataclass(frozen=True, config=_FILE)
class DomainLoss:
    """Loss of a domain in nats per token, with its interval; a subset of `evaluation.domain_results.DomainLoss`."""

    domain: str
    split: Split
    documents: int
    tokens: int
    loss: float
    interval: tuple[float, float] | None
    loss_per_byte: float | None
    bits_per_byte: float | None


@checked_dataclass(frozen=True, config=_FILE)
class DomainOptions:
    """Options of the suite `domains` that are used here."""

    confidence: float


@checked_dataclass(frozen=True, config=_FILE)
class Domains:
    """Fields of domains.json that are used here."""

    step: int
    options: DomainOptions
    domains: list[DomainLoss]


@checked_dataclass(frozen=True, config=_FILE)
class MeanScore:
    """Mean score of a retrieval task at a length, from 0 to 1, with its interval. A `depth` of None is all depths."""

    task: str
    length: int
    depth: float | None
    samples: int
    score: float
    low: float
    high: float


@checked_dataclass(frozen=True, config=_FILE)
class Retrieval:
    """Fields of retrieval.json that are used here."""

    step: int
    confidence: float
    by_length: list[MeanScore]
    by_depth: list[MeanScore]


@checked_dataclass(frozen=True, config=_FILE)
class FewshotMetric:
    """Metric of a few-shot task."""

    name: str
    filter: str
    value: float | str
    stderr: float | None


@checked_dataclass(frozen=True, config=_FILE)
class FewshotTask:
    """Results of a few-shot task."""

    num_fewshot: int | None
    rows: int | None
    metrics: list[FewshotMetric]


@checked_dataclass(frozen=True, config=_FILE)
class Fewshot:
    """Fields of fewshot.json that are used here."""

    step: int
    tasks: dict[str, FewshotTask]


@dataclass(frozen=True)
class Suites:
    """Newest suite results of a run; None for a suite without results.

    Attributes:
        run: name of the run.
        architecture: label of its architecture.
        domains: losses by domain.
        retrieval: mean scores of the retrieval tests.
        picture: heat map of the retrieval scores as PNG.
        fewshot: few-shot results by task.
    """

    run: str
    architecture: str
    domains: Domains | None
    retrieval: Retrieval | None
    picture: bytes | None
    fewshot: Fewshot | None

    @property
    def label(self) -> str:
        """Name of the run, followed by the label of its architecture if that is different."""
        return self.run if self.run == self.architecture else f"{self.run}: {self.architecture}"


@dataclass(frozen=True)
class HeatMap:
    """Heat map of a run's retrieval scores by length and depth.

    Attributes:
        name: file name without its suffix.
        title: run, architecture and step.
        png: the image.
    """

    name: str
    title: str
    png: bytes


def read_suites(architectures: Sequence[Architecture]) -> list[Suites]:
    """Read the results of all runs that have any, in the order of the runs.

    Raises:
        UserError: a result file is damaged.
    """
    suites = [
        _read_run_suites(run.path, run.name, architecture.label)
        for architecture in architectures
        for run in architecture.runs
    ]
    return [results for results in suites if results.domains or results.retrieval or results.fewshot]


def _read_run_suites(folder: Path, name: str, label: str) -> Suites:
    retrieval = _find_newest(folder, "retrieval.json")
    picture = None if retrieval is None else retrieval.with_suffix(".png")
    return Suites(
        run=name,
        architecture=label,
        domains=_parse_file(_find_newest(folder, "domains.json"), Domains),
        retrieval=_parse_file(retrieval, Retrieval),
        picture=_read_picture(picture),
        fewshot=_parse_file(_find_newest(folder, "fewshot.json"), Fewshot),
    )


def _read_picture(path: Path | None) -> bytes | None:
    if path is None or not path.is_file():
        return None
    try:
        return read_regular(path, _MAX_PICTURE_BYTES)
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", _HINT) from None


def _find_newest(folder: Path, name: str) -> Path | None:
    """Find the file of the last step in `evaluation/step_*`, where `selectron evaluate` and training write it."""
    paths = folder.glob(f"{EVALUATIONS}/*/{name}")
    files = {step: path for path in paths if (step := parse_step_name(path.parent.name)) is not None}
    return files[max(files)] if files else None


def _parse_file(path: Path | None, kind: type[File]) -> File | None:
    if path is None:
        return None
    try:
        return TypeAdapter(kind).validate_json(read_regular(path))
    except (OSError, ValidationError):
        raise UserError(str(path), "was not written by a suite", _HINT) from None


def to_dict(suites: Sequence[Suites]) -> dict[str, Any]:
    """Return all numbers as a list of runs per suite, for JSON."""
    return {
        suite: [
            {"run": entry.run, "architecture": entry.architecture, **asdict(results)}
            for entry in suites
            if (results := getattr(entry, suite)) is not None
        ]
        for suite in ("domains", "retrieval", "fewshot")
    }


def heat_maps(suites: Sequence[Suites]) -> list[HeatMap]:
    """Return the heat maps of all runs that have one, under distinct names."""
    maps: list[HeatMap] = []
    for entry in suites:
        if entry.retrieval is not None and entry.picture is not None:
            stem = f"retrieval_{re.sub(r'[^A-Za-z0-9.+-]+', '_', entry.run)}"
            used = {map.name for map in maps}
            names = (f"{stem}{f'_{number}' if number > 1 else ''}" for number in counter(1))
            name = next(name for name in names if name not in used)
            maps.append(HeatMap(name, _title(entry, entry.retrieval.step), entry.picture))
    return maps


def as_tables(suites: Sequence[Suites]) -> dict[str, str]:
    """Return the numbers as CSV by file name, without the files of suites that no run has."""
    tables = {
        "domains.csv": (("split", "domain", *LOSS_COLUMNS), _loss_rows(suites)),
        "retrieval.csv": (SCORE_COLUMNS, _score_rows(suites)),
        "fewshot.csv": (("task", "num_fewshot", *METRIC_COLUMNS), _metric_rows(suites)),
    }
    non_empty = {f"{suite}.csv" for suite, runs in to_dict(suites).items() if runs}
    return {
        name: as_csv(("run", "architecture", "step", *columns), rows)
        for name, (columns, rows) in tables.items()
        if name in non_empty
    }


def _loss_rows(suites: Sequence[Suites]) -> Iterator[tuple[Any, ...]]:
    for entry, step, loss in _losses(suites):
        names = entry.run, entry.architecture, step, column_name(loss.split), loss.domain
        interval = loss.interval or (None, None)
        per_byte = loss.loss_per_byte, loss.bits_per_byte
        yield (*names, loss.documents, loss.tokens, loss.loss, *interval, *per_byte)


def _score_rows(suites: Sequence[Suites]) -> Iterator[tuple[Any, ...]]:
    for entry in suites:
        if (results := entry.retrieval) is not None:
            for mean in (*results.by_length, *results.by_depth):
                yield (entry.run, entry.architecture, results.step, *(getattr(mean, name) for name in SCORE_COLUMNS))


def _metric_rows(suites: Sequence[Suites]) -> Iterator[tuple[Any, ...]]:
    for entry in suites:
        if (results := entry.fewshot) is not None:
            for name, task in results.tasks.items():
                names = entry.run, entry.architecture, results.step, name, task.num_fewshot
                yield from (
                    (*names, *(getattr(metric, column) for column in METRIC_COLUMNS)) for metric in task.metrics
                )


def _losses(suites: Sequence[Suites]) -> list[tuple[Suites, int, DomainLoss]]:
    """Return the losses of all runs with their steps, sorted by split, then by first occurrence of the domain."""
    rows = [(entry, entry.domains.step, loss) for entry in suites if entry.domains for loss in entry.domains.domains]
    splits, domains = list(SPLITS), list(dict.fromkeys(loss.domain for *_, loss in rows))
    return sorted(rows, key=lambda row: (splits.index(row[2].split), domains.index(row[2].domain)))


def loss_table(suites: Sequence[Suites]) -> Table:
    """Return a table of losses with a row per domain and run."""
    levels = dict.fromkeys(f"{100 * entry.domains.options.confidence:.6g} %" for entry in suites if entry.domains)
    caption = (
        f"Losses with intervals of {' or '.join(levels)} over documents; "
        "per byte of UTF-8 where all of a domain was read; "
        "each run at its newest tested step, so not at matched training loss"
    )
    columns = ["domain", "split", "run", "step", "nats per token", "bits per byte", "documents", "tokens"]
    return Table(caption, columns, [_loss_cells(*row) for row in _losses(suites)])


def _loss_cells(entry: Suites, step: int, loss: DomainLoss) -> list[Cell]:
    nats = number(loss.loss)
    if nats != NOTHING and loss.interval is not None:
        nats = replace(nats, note="{:.4f} to {:.4f}".format(*loss.interval))
    bits = NOTHING if loss.bits_per_byte is None else number(loss.bits_per_byte)
    names = text(loss.domain), text(SPLITS[loss.split]), text(entry.label)
    return [*names, count(step), nats, bits, count(loss.documents), count(loss.tokens)]


def few_documents(suites: Sequence[Suites]) -> list[str]:
    """Return the domains with too few documents for a reliable interval."""
    return sorted({loss.domain for *_, loss in _losses(suites) if loss.documents < FEW_DOCUMENTS})


def retrieval_table(suites: Sequence[Suites]) -> Table:
    """Return a table of retrieval scores with a row per task and length, and a column per run."""
    levels = dict.fromkeys(f"{100 * entry.retrieval.confidence:.6g} %" for entry in suites if entry.retrieval)
    intervals = " or ".join(levels)
    caption = f"Mean scores in per cent with Wilson's interval of {intervals}, over all depths"
    return _table_by_run(
        caption,
        [(entry, entry.retrieval.step, dict(_score_cells(entry.retrieval))) for entry in suites if entry.retrieval],
    )


def fewshot_table(suites: Sequence[Suites]) -> Table:
    """Return a table of few-shot results with a row per task and metric, and a column per run."""
    caption = "lm-eval's metrics with their standard errors"
    return _table_by_run(
        caption, [(entry, entry.fewshot.step, dict(_metric_cells(entry.fewshot))) for entry in suites if entry.fewshot]
    )


def _table_by_run(caption: str, columns: Sequence[tuple[Suites, int, dict[str, Cell]]]) -> Table:
    """Build a table from columns by run, with rows in the order of first occurrence."""
    names = dict.fromkeys(name for *_, cells in columns for name in cells)
    return Table(
        f"{caption}; each run at its newest tested step",
        ["test", *(_title(entry, step) for entry, step, _ in columns)],
        [[text(name), *(cells.get(name, NOTHING) for *_, cells in columns)] for name in names],
    )


def _title(entry: Suites, step: int) -> str:
    return f"{entry.label}, step {step}"


def _score_cells(results: Retrieval) -> Iterator[tuple[str, Cell]]:
    for mean in results.by_length:
        uncertainty = f"{100 * mean.low:.1f} to {100 * mean.high:.1f}"
        yield f"{mean.task}, {mean.length} tokens", Cell(f"{100 * mean.score:.1f}", mean.score, uncertainty)


def _metric_cells(results: Fewshot) -> Iterator[tuple[str, Cell]]:
    for name, task in results.tasks.items():
        shots = f", {task.num_fewshot}-shot" if task.num_fewshot else ""
        for metric in task.metrics:
            filtered = "" if metric.filter == "none" else f" ({metric.filter})"
            error = "" if metric.stderr is None else f"\u00b1 {metric.stderr:.4f}"
            value = metric.value
            cell = Cell(f"{value:.4f}", value, error) if isinstance(value, float) else text(value, error)
            yield f"{name}{shots}: {metric.name}{filtered}", cell
