"""lm-eval's own definitions of the seven tasks over the rows of `questions.py`, and its results for its own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from questions import SETS

from megatron_ext.evaluation.fewshot.results import FewshotResults

LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"
DEFINITIONS = {
    "piqa": "piqa/piqa.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "winogrande": "winogrande/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
}


def definitions(folder: Path, **changes: Any) -> Path:
    """Write lm-eval's task definitions with the rows in `columns` in place of the hub's."""
    target = folder / ("lm_eval" + "_".join(changes))
    target.mkdir(exist_ok=True)
    for task, path in DEFINITIONS.items():
        splits = ", ".join(f"{split}: {folder}/columns/{task}/{split}.jsonl" for split in SETS[task][1])
        lines = [
            f"include: {LM_EVAL_TASKS / path}",
            f"task: {task}",
            "dataset_path: json",
            "dataset_name: null",
            f"dataset_kwargs: {{cache_dir: {folder}/cache, data_files: {{{splits}}}}}",
            *(f"{name}: {value}" for name, value in changes.items()),
        ]
        (target / f"{task}.yaml").write_text("\n".join(lines))
    return target


def lm_evals_numbers(own: Any, tasks: list[str], include: Path, **options: Any) -> dict[tuple[str, str, str], Any]:
    manager = TaskManager(include_path=str(include), include_defaults=False)
    output = simple_evaluate(model=own, tasks=list(tasks), task_manager=manager, **options)
    return {
        (task, *key.split(",")): value
        for task, numbers in output["results"].items()
        for key, value in numbers.items()
        if "," in key
    }


def our_numbers(results: FewshotResults | None) -> dict[tuple[str, str, str], Any]:
    assert results is not None
    numbers: dict[tuple[str, str, str], Any] = {}
    for task in results.tasks:
        for metric in task.metrics:
            numbers[task.name, metric.name, metric.filter] = metric.value
            numbers[task.name, f"{metric.name}_stderr", metric.filter] = metric.stderr
    return numbers


def same(ours: dict[tuple[str, str, str], Any], theirs: dict[tuple[str, str, str], Any]) -> None:
    """Assert equality. lm-eval prints four decimals, and N/A for a missing value."""
    assert ours == {key: None if value == "N/A" else value for key, value in theirs.items()}
