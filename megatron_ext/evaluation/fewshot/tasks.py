"""Tasks of lm-eval. Those of `PUBLISHED_SETS` can read local files; prompts, choices and metrics are always lm-eval's.

This module imports lm-eval.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval.tasks._yaml_loader import load_yaml

from megatron_ext.evaluation.fewshot.adapter import parse_generation_settings
from megatron_ext.evaluation.fewshot.options import FewshotOptions, Split
from megatron_ext.evaluation.fewshot.published import PUBLISHED_SETS, Row, find_file, read_rows
from megatron_ext.utils.errors import UserError

VALIDATION_ONLY = {"training_split": None, "test_split": "validation", "fewshot_split": "validation"}
"""Changes of a task's definition that take evaluated rows and few-shot examples from the validation split.

The validation split becomes the test split: only there does lm-eval exclude a row from its own examples."""


class LocalTask(ConfigurableTask):
    """lm-eval task over rows in memory.

    Args:
        config: lm-eval's definition of the task.
        rows: rows by split.
        sources: files of the rows, by split.
    """

    def __init__(self, config: dict[str, Any], rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Path]) -> None:
        self._rows, self.sources = rows, dict(sources)
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Use the rows in memory instead of a download from the Hugging Face hub."""
        self.dataset = datasets.DatasetDict(
            {split: datasets.Dataset.from_list(list(rows)) for split, rows in self._rows.items()}
        )


def local_task(task: str, data: Path, num_fewshot: int, split: Split) -> LocalTask:
    """Load one of `PUBLISHED_SETS` from files in a folder.

    Args:
        task: name of the task.
        data: the user's folder, with a subfolder for each test set.
        num_fewshot: few-shot examples before each question.
        split: `published`: the rows that lm-eval evaluates, which are the test split if its labels are published (ARC,
            OpenBookQA) and else the validation split; examples from the training split. `validation`: rows and
            examples from the validation split.

    Raises:
        UserError: a file is missing or damaged, or has too few rows for that many examples.
    """
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / PUBLISHED_SETS[task].definition)
    config.pop("tag", None)
    if split == "validation":
        config |= VALIDATION_ONLY
    elif not num_fewshot:
        config["training_split"] = None  # only examples need its rows
    evaluated = config.get("test_split") or config["validation_split"]
    examples = config.get("fewshot_split") or config["training_split"]
    splits = dict.fromkeys([evaluated, examples] if num_fewshot else [evaluated])
    sources = {name: find_file(task, name, data) for name in splits}
    rows = {name: read_rows(task, path) for name, path in sources.items()}
    if num_fewshot and len(rows[examples]) <= num_fewshot:
        problem = f"{num_fewshot} examples before each question, of the {len(rows[examples])} in {sources[examples]}"
        raise UserError("fewshot.num_fewshot", problem, "request fewer examples than there are rows")
    config["validation_split"] = "validation" if "validation" in rows else None
    return LocalTask(config, rows, sources)


def load_tasks(options: FewshotOptions, max_length: int) -> dict[str, Any]:
    """Load tasks and groups for `lm_eval.evaluate`, with the number and seed of their few-shot examples set.

    Args:
        options: tasks and the source of their rows.
        max_length: maximum number of tokens of a forward pass.

    Raises:
        UserError: as in `evaluate_fewshot`.
    """
    if options.include_path is not None and not options.include_path.is_dir():
        raise UserError(
            "fewshot.include_path",
            f"{options.include_path} is not a directory",
            "choose a directory that contains lm-eval's YAML files",
        )
    manager = TaskManager(include_path=options.include_path, include_defaults=False)  # only the user's definitions
    local = set() if options.data is None else set(PUBLISHED_SETS) - set(manager.all_tasks)
    if missing := [name for name in options.tasks if name not in local and not _is_known(manager, name)]:
        manager = _all_definitions(options.include_path)
        for name in missing:
            _check_name(name, manager)
    num_fewshot = options.num_fewshot or 0
    names = dict.fromkeys(task for name in options.tasks for task in _tasks_of_tag(name, manager))
    loaded = _load(
        manager,
        [
            local_task(name, options.data, num_fewshot, options.split) if options.data and name in local else name
            for name in names
        ],
    )
    for name, task in loaded["tasks"].items():
        _check_task(name, task, options, max_length)
        _set_examples(task, options)
    return loaded


@cache
def _all_definitions(include_path: Path | None) -> TaskManager:
    """Index lm-eval's and the user's definitions. This takes seconds: it is cached, and skipped if not needed."""
    return TaskManager(include_path=include_path)


def _is_known(manager: TaskManager, name: str) -> bool:
    return name in manager.task_index or Path(name).is_file()


def _check_name(name: str, manager: TaskManager) -> None:
    if not _is_known(manager, name):
        close = difflib.get_close_matches(name, manager.all_tasks, n=5)
        hint = f"did you mean {', '.join(close)}?" if close else "`lm-eval ls tasks` lists all names"
        raise UserError("fewshot.tasks", f"lm-eval has no task, group or tag {name!r}", hint)


def _tasks_of_tag(name: str, manager: TaskManager) -> list[str]:
    """Return the tasks of a tag, some of which may be local; the name itself if it is not a tag."""
    entry = manager.task_index.get(name)
    return sorted(entry.tags) if entry is not None and entry.kind is Kind.TAG else [name]


def _load(manager: TaskManager, specs: list[str | LocalTask]) -> dict[str, Any]:
    """Load tasks with lm-eval; most of those given by name read their rows from the Hugging Face hub."""
    try:
        return manager.load(specs)
    except OSError as error:
        known = ", ".join(PUBLISHED_SETS)
        hint = f"provide the rows in the Hugging Face cache, or the files of {known} in a folder (fewshot.data)"
        raise _not_loaded("rows could not be read", specs, error, hint) from error
    except ImportError as error:
        raise _not_loaded("a package is missing", specs, error, "install it, or remove the task") from error
    except Exception as error:  # a task's own code may raise anything
        hint = "fix the task or what it needs, or remove it"
        raise _not_loaded(f"{type(error).__name__} in the task's definition", specs, error, hint) from error


def _not_loaded(problem: str, specs: list[str | LocalTask], error: Exception, hint: str) -> UserError:
    names = ", ".join(spec for spec in specs if isinstance(spec, str))
    first_line = next(iter(str(error).splitlines()), "")
    return UserError("fewshot.tasks", f"{problem} ({names}): {first_line}", hint)


def _check_task(name: str, task: Any, options: FewshotOptions, max_length: int) -> None:
    """Raise a `UserError` for a task that a text model cannot run, before the first forward pass."""
    remove = "remove the task"
    if getattr(task, "UNSAFE_CODE", False) and not options.confirm_run_unsafe_code:
        hint = f"set fewshot.confirm_run_unsafe_code=true if it may run, or {remove}"
        raise UserError("fewshot.tasks", f"{name} runs code written by a model", hint)
    if getattr(task, "MULTIMODAL", False):
        raise UserError("fewshot.tasks", f"{name} uses images or audio", remove)
    if task.OUTPUT_TYPE == "generate_until":
        parse_generation_settings(task.config.generation_kwargs or {}, max_length)


def _set_examples(task: Any, options: FewshotOptions) -> None:
    """Set the number and seed of few-shot examples as `lm_eval.simple_evaluate` does.

    A task whose definition sets 0 examples keeps 0.
    """
    default = task.get_config("num_fewshot")
    if default is None or (options.num_fewshot is not None and default != 0):
        task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
    task.set_fewshot_seed(seed=options.seed)
