"""Few-shot tests of a model with lm-eval.

lm-eval is imported lazily: the import takes seconds, and the package is an optional dependency.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.config.schema import RunConfig
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.results import FewshotResults, task_results
from megatron_ext.evaluation.generators import preserve_random_states
from megatron_ext.evaluation.text_model import TextModel
from megatron_ext.utils.errors import UserError

BOOTSTRAP_ITERATIONS = 100_000
"""Bootstrap iterations for standard errors, the default of lm-eval."""


def evaluate_fewshot(model: TextModel, options: FewshotOptions) -> FewshotResults | None:
    """Run few-shot tests of a model. Collective: every rank calls it with the same options.

    The random generators of this process are restored afterwards.

    Args:
        model: model to test.
        options: tasks and their settings.

    Returns:
        The results on the first rank; None on other ranks, whose output is also suppressed.

    Raises:
        UserError: lm-eval is not installed; a task is unknown, cannot be loaded, needs unsupported generation
            settings or runs code without permission; or a file is missing or damaged.
    """
    check_installed()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    start = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_lm_eval_seeds())
        if not is_first:
            stack.enter_context(_silence())
        fields = _evaluate(model, options, is_first)
    if not is_first:
        return None
    return FewshotResults(
        **fields,
        seconds=time.monotonic() - start,
        lm_eval=metadata.version("lm-eval"),
        settings=asdict(options) | {"data": _path_text(options.data), "include_path": _path_text(options.include_path)},
    )


def check_installed() -> None:
    """Raise a `UserError` if lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise UserError("fewshot", "lm-eval is not installed", "pip install 'selectron[eval]'")


def check_fewshot(options: FewshotOptions, max_length: int) -> None:
    """Check the options without a model. The tasks are loaded and discarded.

    Args:
        options: tasks and their settings.
        max_length: maximum number of tokens of a forward pass.

    Raises:
        UserError: as in `evaluate_fewshot`.
    """
    check_installed()
    with _lm_eval_seeds(), _silence():
        from megatron_ext.evaluation.fewshot.tasks import load_tasks

        load_tasks(options, max_length)


@contextmanager
def _silence() -> Iterator[None]:
    """Context manager that discards standard output and standard error."""
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        yield


def _path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


@contextmanager
def _lm_eval_seeds() -> Iterator[None]:
    """Context manager that seeds the random generators as lm-eval does and restores them afterwards."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    with preserve_random_states():
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        yield


def _evaluate(model: TextModel, options: FewshotOptions, is_first: bool) -> dict[str, Any]:
    """Run lm-eval and return the fields `tasks`, `asked` and `truncated` of `FewshotResults`."""
    from lm_eval.evaluator import evaluate

    from megatron_ext.evaluation.fewshot.adapter import SelectronLM
    from megatron_ext.evaluation.fewshot.tasks import LocalTask, load_tasks

    loaded = load_tasks(options, model.max_length)
    lm = SelectronLM(model, options.seed)
    # lm-eval starts processes to bootstrap some standard errors. One rank is enough for that.
    bootstrap_iters = BOOTSTRAP_ITERATIONS if is_first else 0
    output = evaluate(
        lm=lm,
        task_dict=loaded,
        limit=options.limit,
        log_samples=False,
        bootstrap_iters=bootstrap_iters,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
    )
    sources = {name: task.sources for name, task in loaded["tasks"].items() if isinstance(task, LocalTask)}
    return {"tasks": task_results(output, sources), "asked": lm.num_texts, "truncated": lm.truncated}


def check_config(options: FewshotOptions, _: RunConfig) -> None:
    """Check that the suite can run on this machine.

    Raises:
        UserError: lm-eval is not installed, or `data` is not a directory.
    """
    check_installed()
    if options.data is not None and not options.data.is_dir():
        hint = "choose a directory that contains the files of the test sets"
        raise UserError("fewshot.data", f"{options.data} is not a directory", hint)
