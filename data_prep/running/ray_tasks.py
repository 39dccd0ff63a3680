"""Tasks on Ray with error propagation: datatrove's own executor treats a failed task as done."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from datatrove.executor import RayPipelineExecutor
from datatrove.utils.stats import PipelineStats

from data_prep.running.workers import configure_worker, silence_datatrove
from megatron_ext.utils.errors import UserError

FAILURES = "failures"
"""Folder beside datatrove's records of finished tasks, with one file per failed task that contains its error."""


class RayExecutor(RayPipelineExecutor):
    """Executor that runs tasks on Ray with one thread per process, without datatrove's messages.

    After a failure, no further task of the stage starts. Running tasks complete.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # datatrove warns that nodes must share the logging folder, which the output requires anyway.
        with silence_datatrove():
            super().__init__(*arguments, **options)

    def run(self) -> None:
        """Run every task that is not finished.

        Raises:
            UserError: a task raised this error, or tasks ended without an error, for example on a lost node.
            RuntimeError: a task raised any other exception, whose traceback is in the message.
        """
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        for name in self._failures():
            self.logging_dir.rm(name)
        if self.get_incomplete_ranks():
            self._warn_if_no_node_fits(ray.nodes())
        with silence_datatrove():
            super().run()
        for name in self._failures():
            with self.logging_dir.open(name, "rt", encoding="utf-8") as file:
                raise _error_from_record(json.load(file))
        missing = len(self.get_incomplete_ranks())
        if missing:
            problem = f"{missing} of {self.tasks} tasks ended on Ray without an error message, also when retried"
            raise UserError("--executor", problem, "check the logs of Ray's workers, then rerun the command to resume")

    def _run_for_rank(self, rank: int, *arguments: Any, **options: Any) -> PipelineStats:
        configure_worker()
        if self._failures():
            raise RuntimeError("not started, because another task of the stage has failed")
        try:
            return super()._run_for_rank(rank, *arguments, **options)
        except Exception as error:
            with self.logging_dir.open(f"{FAILURES}/{rank:05d}.json", "wt", encoding="utf-8") as file:
                json.dump(_error_record(error), file)
            raise

    def _warn_if_no_node_fits(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        """Print a warning if no node is large enough for a task. Ray waits silently until such a node joins."""
        gib = self.cpus_per_task * self.mem_per_cpu_gb
        for node in nodes:
            resources = node["Resources"]
            has_cpus = resources.get("CPU", 0) >= self.cpus_per_task
            has_memory = resources.get("memory", 0) >= gib * 2**30
            if node["Alive"] and has_cpus and has_memory:
                return
        required = f"the {self.cpus_per_task} CPU and {gib:g} GiB of memory that a task requires"
        warning = f"no node of the Ray cluster offers {required}; waiting for one that does"
        print(f"selectron: warning: {warning}", file=sys.stderr, flush=True)

    def _failures(self) -> list[str]:
        found: list[str] = self.logging_dir.list_files(FAILURES)
        return found


def _error_record(error: Exception) -> dict[str, str]:
    if isinstance(error, UserError):
        return {"where": error.where, "problem": error.problem, "hint": error.hint}
    return {"traceback": "".join(traceback.format_exception(error))}


def _error_from_record(record: dict[str, str]) -> Exception:
    if "traceback" in record:
        return RuntimeError(f"a task failed on Ray\n{record['traceback']}")
    return UserError(**record)
