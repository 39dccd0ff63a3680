"""Evaluation suites between two optimizer steps, under the run's own layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.evaluation.generators import preserve_random_states
from megatron_ext.evaluation.registry import SUITES
from megatron_ext.evaluation.suite import EvalContext, make_folder, results_folder
from megatron_ext.parallel.agreement import raise_on_all_ranks

Testing = Callable[[], AbstractContextManager[Sequence[torch.nn.Module]]]


class SuitesBetweenSteps:
    """Evaluate the model of a run between steps, without affecting training.

    Construction is a collective call, like the methods. It checks the options but does not run the model.

    Args:
        context: the run's model.
        testing: `RunOptimizer.evaluation_chunks`: returns a context manager that yields the model chunks.
        options: options of each suite, by name.
        folder: run folder.

    Raises:
        UserError: a suite would reject its options when it runs, e.g. a file, a task or a length.
    """

    def __init__(self, context: EvalContext, testing: Testing, options: Mapping[str, Any], folder: Path) -> None:
        self._context, self._testing, self._options, self._folder = context, testing, options, folder
        raise_on_all_ranks(self._check)

    def _check(self) -> None:
        for name, options in self._options.items():
            SUITES[name].check()(self._context, options)

    def run(self, progress: Progress) -> list[dict[str, Any]]:
        """Run all suites and write their results, as `selectron evaluate` does.

        Args:
            progress: progress of the run.

        Returns:
            Records for `suites.jsonl`; empty except on the first rank.
        """
        output = results_folder(self._folder, progress.step)
        raise_on_all_ranks(lambda: make_folder(output))
        records = []
        with preserve_random_states(), self._testing() as chunks:
            context = replace(self._context, progress=progress, chunks=chunks)
            for name, options in self._options.items():
                result = SUITES[name].test()(context, options, output)
                if result is not None:
                    about = {"step": progress.step, "tokens": progress.tokens, "suite": name}
                    records.append({**about, "scores": result.scores})
        return records
