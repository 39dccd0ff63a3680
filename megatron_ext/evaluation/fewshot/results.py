"""What few-shot tests found, as JSON and as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.reports import finite, table, write_both

COLUMNS = ("task", "version", "examples", "rows", "filter", "metric", "value", "standard error")


@dataclass(frozen=True)
class Metric:
    """One number of a task.

    Attributes:
        name: of lm-eval's metric.
        filter: what lm-eval took from the answers before; `none`: all of them.
        value: the number.
        stderr: its standard error; None: lm-eval has none for this metric.
        higher_is_better: None: lm-eval does not say.
    """

    name: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool | None


@dataclass(frozen=True)
class TaskResult:
    """All numbers of a task, or of a group of tasks.

    Attributes:
        name: lm-eval's.
        version: of its definition; None: it has none.
        num_fewshot: examples before each question.
        rows: tested on; None: a group.
        rows_there: rows there are; more if a limit was set.
        sources: the user's files, by split; empty: lm-eval's own data.
        metrics: in lm-eval's order.
    """

    name: str
    version: str | float | None
    num_fewshot: int | None
    rows: int | None
    rows_there: int | None
    sources: dict[str, str]
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class FewshotResults:
    """Of all tasks.

    Attributes:
        tasks: in the order they were asked for.
        asked: texts that the model was given; each choice of a question is one.
        truncated: those of them that were longer than it takes, and lost their beginning.
        seconds: that all took.
        lm_eval: its version.
        settings: what was asked for.
    """

    tasks: tuple[TaskResult, ...]
    asked: int
    truncated: int
    seconds: float
    lm_eval: str
    settings: dict[str, Any]


def task_results(found: Mapping[str, Any], sources: Mapping[str, Mapping[str, Path]]) -> tuple[TaskResult, ...]:
    """Numbers out of what `lm_eval.evaluate` returns.

    Args:
        found: that.
        sources: the user's files, by task and split.
    """
    return tuple(_task_result(name, found, sources.get(name, {})) for name in found["results"])


def _task_result(name: str, found: Mapping[str, Any], sources: Mapping[str, Path]) -> TaskResult:
    rows = found["n-samples"].get(name, {})
    return TaskResult(
        name=name,
        version=found["versions"].get(name),
        num_fewshot=found["n-shot"].get(name),
        rows=rows.get("effective"),
        rows_there=rows.get("original"),
        sources={split: str(path) for split, path in sources.items()},
        metrics=tuple(_metrics(found["results"][name], found["higher_is_better"].get(name, {}))),
    )


def _metrics(numbers: Mapping[str, Any], higher_is_better: Mapping[str, bool | None]) -> list[Metric]:
    """lm-eval's keys are `acc,none` and `acc_stderr,none`; those without a comma tell about the task."""
    metrics = []
    for key, value in numbers.items():
        name, comma, kind = key.partition(",")
        if comma and not name.endswith("_stderr"):
            stderr = numbers.get(f"{name}_stderr,{kind}")
            known = stderr if isinstance(stderr, float) else None
            metrics.append(Metric(name, kind, value, known, higher_is_better.get(name)))
    return metrics


def markdown(results: FewshotResults) -> str:
    """The table; numbers with as many digits as lm-eval prints."""
    lines = table(COLUMNS, [_cells(task, metric) for task in results.tasks for metric in task.metrics])
    said = [f"lm-eval {results.lm_eval}, {results.seconds:.0f} s."]
    if results.truncated:
        said.append(
            f"{results.truncated} of {results.asked} texts were longer than the model takes and lost their beginning."
        )
    return "\n".join([" ".join(said), "", *lines, *_source_lines(results)]) + "\n"


def _cells(task: TaskResult, metric: Metric) -> list[str]:
    rows = "" if task.rows is None else f"{task.rows} of {task.rows_there}"
    stderr = "" if metric.stderr is None else f"{metric.stderr:.4f}"
    value = f"{metric.value:.4f}" if isinstance(metric.value, float) else str(metric.value)
    shots = "" if task.num_fewshot is None else str(task.num_fewshot)
    version = "" if task.version is None else str(task.version)
    return [task.name, version, shots, rows, metric.filter, metric.name, value, stderr]


def _source_lines(results: FewshotResults) -> list[str]:
    files = [(task.name, split, path) for task in results.tasks for split, path in task.sources.items()]
    lines = [f"* {name}, {split} rows: {path}" for name, split, path in files]
    return ["", *lines] if lines else []


def scores(results: FewshotResults) -> dict[str, float]:
    """The numbers by `task/metric`, and `task/metric,filter` where answers were filtered; words are left out."""
    return {
        f"{task.name}/{metric.name}{'' if metric.filter == 'none' else ',' + metric.filter}": float(metric.value)
        for task in results.tasks
        for metric in task.metrics
        if isinstance(metric.value, (int, float)) and math.isfinite(metric.value)
    }


def write_results(results: FewshotResults, about: dict[str, Any], folder: Path) -> None:
    """Write fewshot.json and fewshot.md into a folder, each whole or not at all.

    Args:
        results: what to write.
        about: which model it was, for the JSON.
        folder: exists.
    """
    write_both(folder, "fewshot", {**about, **finite(_to_dict(results))}, markdown(results))


def _to_dict(results: FewshotResults) -> dict[str, Any]:
    numbers = asdict(results)
    tasks = {task["name"]: task for task in numbers.pop("tasks")}
    for task in tasks.values():
        task["metrics"] = list(task["metrics"])
    return {**numbers, "tasks": tasks}
