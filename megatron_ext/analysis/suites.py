"""What suites of tests found of runs, read from the runs' folders and laid out for the report."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.analysis.architecture import Architecture
from megatron_ext.errors import UserError

File = TypeVar("File")
_FILE = ConfigDict(extra="ignore")

NOTHING = "\u2013"


@checked_dataclass(frozen=True, config=_FILE)
class Mean:
    """The mean score of a retrieval task at a length, from 0 to 1, and its interval; `depth` None: over all."""

    task: str
    length: int
    depth: float | None
    samples: int
    score: float
    low: float
    high: float


@checked_dataclass(frozen=True, config=_FILE)
class Retrieval:
    """retrieval.json, as far as it is used here."""

    step: int
    confidence: float
    by_length: list[Mean]
    by_depth: list[Mean]


@checked_dataclass(frozen=True, config=_FILE)
class Number:
    """A metric of a few-shot task."""

    name: str
    filter: str
    value: float | str
    stderr: float | None


@checked_dataclass(frozen=True, config=_FILE)
class Task:
    """A few-shot task."""

    num_fewshot: int | None
    rows: int | None
    metrics: list[Number]


@checked_dataclass(frozen=True, config=_FILE)
class Fewshot:
    """fewshot.json, as far as it is used here."""

    step: int
    tasks: dict[str, Task]


@dataclass(frozen=True)
class Suites:
    """The newest results of a run; None: it has none.

    Attributes:
        run: its name.
        architecture: its label.
        retrieval: means of scores.
        picture: their heat map, PNG.
        fewshot: by task.
    """

    run: str
    architecture: str
    retrieval: Retrieval | None
    picture: bytes | None
    fewshot: Fewshot | None


def read_suites(architectures: Sequence[Architecture]) -> list[Suites]:
    """Results of the runs that have any, in their order.

    Raises:
        UserError: a file of them is damaged.
    """
    found = [_read(run.path, run.name, one.label) for one in architectures for run in one.runs]
    return [one for one in found if one.retrieval is not None or one.fewshot is not None]


def _read(folder: Path, name: str, label: str) -> Suites:
    retrieval, fewshot = _newest(folder, "retrieval.json"), _newest(folder, "fewshot.json")
    picture = None if retrieval is None else retrieval.with_suffix(".png")
    return Suites(
        run=name,
        architecture=label,
        retrieval=None if retrieval is None else _parsed(retrieval, Retrieval),
        picture=picture.read_bytes() if picture is not None and picture.is_file() else None,
        fewshot=None if fewshot is None else _parsed(fewshot, Fewshot),
    )


def _newest(folder: Path, name: str) -> Path | None:
    """The file of the last step that has one, where `selectron evaluate` and training write it."""
    files = {path.parent.name.removeprefix("step_"): path for path in folder.glob(f"evaluation/step_*/{name}")}
    steps = [int(step) for step in files if step.isdecimal()]
    return files[str(max(steps))] if steps else None


def _parsed(path: Path, kind: type[File]) -> File:
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise UserError(str(path), "is not what a suite has written", "run `selectron evaluate` again") from None


def to_dict(found: Sequence[Suites]) -> dict[str, Any]:
    """All numbers: a list of runs a suite."""
    return {
        suite: [
            {"run": one.run, "architecture": one.architecture, **asdict(results)}
            for one in found
            if (results := getattr(one, suite)) is not None
        ]
        for suite in ("retrieval", "fewshot")
    }


def heat_maps(found: Sequence[Suites]) -> list[dict[str, str]]:
    """What the page shows of each heat map."""
    return [
        {"title": _title(one, one.retrieval.step), "picture": base64.b64encode(one.picture).decode("ascii")}
        for one in found
        if one.retrieval is not None and one.picture is not None
    ]


def retrieval_table(found: Sequence[Suites]) -> dict[str, Any]:
    """A row a task and length, a column a run."""
    return _table([(one, one.retrieval.step, dict(_means(one.retrieval))) for one in found if one.retrieval])


def intervals(found: Sequence[Suites]) -> str:
    """How sure the intervals of retrieval are, in per cent."""
    sure = dict.fromkeys(f"{100 * one.retrieval.confidence:.6g} %" for one in found if one.retrieval)
    return " or ".join(sure)


def fewshot_table(found: Sequence[Suites]) -> dict[str, Any]:
    """A row a metric of a task, a column a run."""
    return _table([(one, one.fewshot.step, dict(_numbers(one.fewshot))) for one in found if one.fewshot])


def _table(columns: Sequence[tuple[Suites, int, dict[str, tuple[str, str]]]]) -> dict[str, Any]:
    """Rows in the order in which they are first met; each cell a value and its uncertainty."""
    names = dict.fromkeys(name for *_, cells in columns for name in cells)
    return {
        "titles": [_title(one, step) for one, step, _ in columns],
        "rows": [(name, [cells.get(name, (NOTHING, "")) for *_, cells in columns]) for name in names],
    }


def _title(one: Suites, step: int) -> str:
    name = one.run if one.run == one.architecture else f"{one.run}: {one.architecture}"
    return f"{name}, step {step}"


def _means(results: Retrieval) -> Iterator[tuple[str, tuple[str, str]]]:
    for mean in results.by_length:
        uncertainty = f"{100 * mean.low:.1f} to {100 * mean.high:.1f}"
        yield f"{mean.task}, {mean.length} tokens", (f"{100 * mean.score:.1f}", uncertainty)


def _numbers(results: Fewshot) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, task in results.tasks.items():
        shots = f", {task.num_fewshot}-shot" if task.num_fewshot else ""
        for number in task.metrics:
            filtered = "" if number.filter == "none" else f" ({number.filter})"
            value = f"{number.value:.4f}" if isinstance(number.value, float) else number.value
            error = "" if number.stderr is None else f"\u00b1 {number.stderr:.4f}"
            yield f"{name}{shots}: {number.name}{filtered}", (value, error)
