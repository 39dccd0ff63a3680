"""Few-shot tests of a model: which tasks, over which rows, and what was found.

lm-eval is imported where it is called: it takes seconds, and is not installed everywhere.
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

from megatron_ext.errors import UserError
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.results import FewshotResults, task_results
from megatron_ext.evaluation.generators import generators_kept
from megatron_ext.evaluation.text_model import TextModel

BOOTSTRAP_DRAWS = 100_000
"""As many as lm-eval draws."""


def evaluate_fewshot(model: TextModel, options: FewshotOptions) -> FewshotResults | None:
    """Test a model. Collective: every rank calls it with the same options.

    The generators of random numbers of this process are afterwards what they were.

    Returns:
        What was found, on the first rank; None on others, which print nothing either.

    Raises:
        UserError: lm-eval is not installed, a task is not known, cannot be loaded, generates as is not done here or
            runs code without leave, or a file is missing or damaged.
    """
    check_installed()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    start = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_own_random_numbers())
        if not is_first:
            stack.enter_context(_silence())
        found = _evaluate(model, options, is_first)
    if not is_first:
        return None
    return FewshotResults(
        **found,
        seconds=time.monotonic() - start,
        lm_eval=metadata.version("lm-eval"),
        settings=asdict(options) | {"data": _text(options.data), "include_path": _text(options.include_path)},
    )


def check_installed() -> None:
    """Raise a UserError if lm-eval is not there."""
    if find_spec("lm_eval") is None:
        raise UserError("fewshot", "lm-eval is not installed", "pip install 'selectron[eval]'")


def check_fewshot(options: FewshotOptions, max_length: int) -> None:
    """Refuse what `evaluate_fewshot` would refuse, without a model: the tasks are loaded, and forgotten.

    Args:
        options: which tasks.
        max_length: tokens that the model takes at most.

    Raises:
        UserError: see there.
    """
    check_installed()
    with _own_random_numbers(), _silence():
        from megatron_ext.evaluation.fewshot.tasks import load_tasks

        load_tasks(options, max_length)


@contextmanager
def _silence() -> Iterator[None]:
    """What is printed within it is lost."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Seeds as lm-eval sets them."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    with generators_kept():
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        yield


def _evaluate(model: TextModel, options: FewshotOptions, is_first: bool) -> dict[str, Any]:
    """The fields of `FewshotResults` that lm-eval tells."""
    from lm_eval.evaluator import evaluate

    from megatron_ext.evaluation.fewshot.adapter import SelectronLM
    from megatron_ext.evaluation.fewshot.tasks import LocalTask, load_tasks

    loaded = load_tasks(options, model.max_length)
    lm = SelectronLM(model, options.seed)
    # Some standard errors are drawn by processes that lm-eval starts: once, not on every rank.
    draws = BOOTSTRAP_DRAWS if is_first else 0
    found = evaluate(
        lm=lm,
        task_dict=loaded,
        limit=options.limit,
        log_samples=False,
        bootstrap_iters=draws,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
    )
    sources = {name: task.sources for name, task in loaded["tasks"].items() if isinstance(task, LocalTask)}
    return {"tasks": task_results(found, sources), "asked": lm.asked, "truncated": lm.truncated}
