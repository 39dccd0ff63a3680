"""Results of few-shot tests, as JSON and as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.utils.markdown import replace_nonfinite, table, write_report

COLUMNS = ("task", "version", "examples", "rows", "filter", "metric", "value", "standard error")


@dataclass(frozen=True)
class Metric:
    """Metric of a task.

    Attributes:
        name: name of the metric in lm-eval.
        filter: name of lm-eval's filter on the answers; `none`: unfiltered.
        value: value of the metric.
        stderr: standard error; None: lm-eval has none for this metric.
        higher_is_better: direction of the metric; None: not defined by lm-eval.
    """

    name: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool | None


@dataclass(frozen=True)
class TaskResult:
    """Metrics of a task, or of a group of tasks.

    Attributes:
        name: name in lm-eval.
        version: version of the definition; None: it has none.
        num_fewshot: few-shot examples before each question; None: unknown.
        rows: number of rows evaluated; None: a group.
        rows_there: number of rows of the data set, more than `rows` if a limit was set; None: a group.
        sources: the user's files, by split; empty: lm-eval's own data.
        metrics: metrics in lm-eval's order.
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
    """Results of all tasks.

    Attributes:
        tasks: results of each task or group, in lm-eval's order.
        asked: number of texts passed to the model; each choice of a question is one text.
        truncated: number of these texts that were too long and lost their beginning.
        seconds: duration of the whole evaluation.
        lm_eval: version of lm-eval.
        settings: options of the evaluation.
    """

    tasks: tuple[TaskResult, ...]
    asked: int
    truncated: int
    seconds: float
    lm_eval: str
    settings: dict[str, Any]


def task_results(output: Mapping[str, Any], sources: Mapping[str, Mapping[str, Path]]) -> tuple[TaskResult, ...]:
    """Convert the results of `lm_eval.evaluate`.

    Args:
        output: return value of `lm_eval.evaluate`.
        sources: the user's files, by task and split.
    """
    return tuple(_task_result(name, output, sources.get(name, {})) for name in output["results"])


def _task_result(name: str, output: Mapping[str, Any], sources: Mapping[str, Path]) -> TaskResult:
    rows = output["n-samples"].get(name, {})
    return TaskResult(
        name=name,
        version=output["versions"].get(name),
        num_fewshot=output["n-shot"].get(name),
        rows=rows.get("effective"),
        rows_there=rows.get("original"),
        sources={split: str(path) for split, path in sources.items()},
        metrics=tuple(_metrics(output["results"][name], output["higher_is_better"].get(name, {}))),
    )


def _metrics(values: Mapping[str, Any], higher_is_better: Mapping[str, bool | None]) -> list[Metric]:
    """Return the metrics of a task. lm-eval's keys are `acc,none` and `acc_stderr,none`; others are not metrics."""
    metrics = []
    for key, value in values.items():
        name, comma, filter_name = key.partition(",")
        if comma and not name.endswith("_stderr"):
            stderr = values.get(f"{name}_stderr,{filter_name}")
            known_stderr = stderr if isinstance(stderr, float) else None
            metrics.append(Metric(name, filter_name, value, known_stderr, higher_is_better.get(name)))
    return metrics


def markdown(results: FewshotResults) -> str:
    """Return the results as a Markdown table, with the number of digits that lm-eval prints."""
    lines = table(COLUMNS, [_cells(task, metric) for task in results.tasks for metric in task.metrics])
    notes = [f"lm-eval {results.lm_eval}, {results.seconds:.0f} s."]
    if results.truncated:
        notes.append(
            f"{results.truncated} of {results.asked} texts exceeded the model's length limit and lost their beginning."
        )
    return "\n".join([" ".join(notes), "", *lines, *_source_lines(results)]) + "\n"


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
    """Return the finite numeric metrics by `task/metric`, or `task/metric,filter` if the answers were filtered."""
    return {
        f"{task.name}/{metric.name}{'' if metric.filter == 'none' else ',' + metric.filter}": float(metric.value)
        for task in results.tasks
        for metric in task.metrics
        if isinstance(metric.value, (int, float)) and math.isfinite(metric.value)
    }


def write_results(results: FewshotResults, about: dict[str, Any], folder: Path) -> None:
    """Write fewshot.json and fewshot.md to a folder, each atomically.

    Args:
        results: results to write.
        about: description of the model for the JSON file.
        folder: an existing folder.
    """
    write_report(folder, "fewshot", {**about, **replace_nonfinite(_to_dict(results))}, markdown(results))


def _to_dict(results: FewshotResults) -> dict[str, Any]:
    fields = asdict(results)
    tasks = {task["name"]: task for task in fields.pop("tasks")}
    for task in tasks.values():
        task["metrics"] = list(task["metrics"])
    return {**fields, "tasks": tasks}
