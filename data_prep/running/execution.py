"""Execution of the stages by datatrove's executors: local processes, Slurm and Ray."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import signal
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import multiprocess
import multiprocess.util
from datatrove.executor import LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import PipelineStats

from data_prep.running.progress import ProgressBoard, show_progress
from data_prep.running.ray_tasks import RayExecutor
from data_prep.running.slurm_jobs import check_no_jobs
from data_prep.running.workers import configure_worker, silence_datatrove
from data_prep.storage import WORK_NAME, locked
from megatron_ext.utils.errors import UserError

PR_SET_PDEATHSIG = 1
"""Constant of Linux's <sys/prctl.h>."""

MEMORY_GB = 2
"""Memory that a Slurm or Ray worker requests, in GB."""


@dataclass(frozen=True)
class Execution:
    """Executor of the tasks, and number of workers.

    Attributes:
        executor: local processes, Slurm jobs or Ray workers.
        workers: maximum number of tasks that run at the same time.
        slurm_partition: partition of Slurm jobs; required for Slurm.
        slurm_time: time limit of a Slurm job, as `hours:minutes:seconds`.
    """

    executor: Literal["local", "slurm", "ray"] = "local"
    workers: int = 1
    slurm_partition: str | None = None
    slurm_time: str = "24:00:00"


@dataclass(frozen=True)
class Stage:
    """Pipeline that runs in a number of tasks, and is complete when all tasks are complete.

    Attributes:
        name: short name.
        steps: datatrove steps, in order.
        tasks: number of tasks, which is independent of the number of workers.
        board: progress board of the tasks; None if they report no progress.
    """

    name: str
    steps: list[PipelineStep]
    tasks: int
    board: ProgressBoard | None = None

    def log_folder(self, root: Path) -> str:
        """Return the folder in which datatrove records finished tasks, inside the work folder."""
        return str((root / WORK_NAME / f"tasks-{self.name}").absolute())  # fsspec expands a leading ~

    def finished_tasks(self, root: Path) -> set[int]:
        """Return the tasks that datatrove has recorded as finished."""
        return {int(path.name) for path in Path(self.log_folder(root), "completions").glob("*")}


def check_execution(execution: Execution) -> None:
    """Raise if the executor cannot be used on this machine.

    Raises:
        UserError: Ray or Slurm is missing, or no partition is given.
    """
    if execution.executor == "ray" and importlib.util.find_spec("ray") is None:
        hint = "install it (pip install 'selectron[ray]') or use local or slurm"
        raise UserError("--executor", "ray is not installed", hint)
    if execution.executor == "slurm":
        if shutil.which("sbatch") is None:
            raise UserError(
                "--executor", "sbatch was not found for slurm", "run it on a Slurm login node, or use local"
            )
        if execution.slurm_partition is None:
            raise UserError("--slurm-partition", "is not given", "give the partition for the tasks")


def run_stages(stages: list[Stage], root: Path, execution: Execution, total_bytes: int, *, progress: bool) -> None:
    """Run stages one after the other. Tasks that an earlier run finished are not run again.

    Args:
        stages: stages in order.
        root: folder being filled.
        execution: executor and number of workers.
        total_bytes: input bytes that a stage with a progress board reads.
        progress: show a bar on standard error.

    Raises:
        UserError: Slurm jobs of an earlier run are writing to the folder.
    """
    check_no_jobs(root, lambda: progress_text(stages, root, total_bytes))
    for stage in stages:
        if stage.board is None:
            _executor(stage, root, execution).run()
        else:
            with show_progress(stage.board, _title(stage, stages), total_bytes, visible=progress):
                _executor(stage, root, execution).run()


def progress_text(stages: list[Stage], root: Path, total_bytes: int) -> str:
    """Describe the progress of jobs that run these stages on other machines, in a few words.

    As in the titles of progress bars, only stages that read the whole input are numbered. The other stages are short.

    Args:
        stages: stages in order.
        root: folder being filled.
        total_bytes: input bytes that a numbered stage reads.
    """
    for index, stage in enumerate(stages):
        finished_tasks = stage.finished_tasks(root)
        if len(finished_tasks) == stage.tasks:
            continue
        if stage.board is not None:
            progress = stage.board.progress(finished_tasks, time.time())
            return f"at stage {_title(stage, stages)}: {progress.describe(total_bytes)}"
        titles = (_title(following, stages) for following in stages[index:] if following.board is not None)
        return f"at {stage.name}, before {next(titles, 'the end')}"
    return "at merging, after all stages"


def _title(stage: Stage, stages: list[Stage]) -> str:
    """Return the name of a stage, preceded by its number among the stages that read the whole input: `1/2 name`."""
    numbered = [other.name for other in stages if other.board is not None]
    return f"{numbered.index(stage.name) + 1}/{len(numbered)} {stage.name}"


def _executor(stage: Stage, root: Path, execution: Execution) -> PipelineExecutor:
    workers = min(execution.workers, stage.tasks)
    common: dict[str, Any] = {"tasks": stage.tasks, "workers": workers, "logging_dir": stage.log_folder(root)}
    if execution.executor == "ray":
        return RayExecutor(stage.steps, **common, mem_per_cpu_gb=MEMORY_GB)
    return QuietExecutor(stage.steps, **common)


class QuietExecutor(LocalPipelineExecutor):
    """Executor that runs tasks in local processes with one thread each, without datatrove's messages."""

    pipeline: list[PipelineStep]

    def run(self) -> Any:
        """Run every task that is not finished."""
        with silence_datatrove():
            return self._run_in_pool() if self.workers > 1 else self._run_in_this_process()

    def _run_in_this_process(self) -> PipelineStats | None:
        # datatrove would start a manager process for its queue even here, which takes longer than a small stage.
        ranks = self.get_incomplete_ranks(range(self.tasks))
        if not ranks:
            return None
        self.save_executor_as_json()
        configure_worker()
        steps, stats = self.pipeline, PipelineStats()
        for rank in ranks:
            self.pipeline = deepcopy(steps)
            stats += self._run_for_rank(rank)
        with self.logging_dir.open("stats.json", "wt") as file:
            stats.save_to_disk(file)
        return stats

    def _run_in_pool(self) -> Any:
        # Workers are forked from a server process. With this preload it imports the modules once for all workers.
        multiprocess.get_context(self.start_method).set_forkserver_preload(["data_prep.stages"])
        # The helper process that datatrove forks would otherwise survive a kill of this process.
        multiprocess.util.register_after_fork(self, _die_with_parent)
        return super().run()

    def _run_for_rank(self, rank: int, *arguments: Any, **options: Any) -> PipelineStats:
        # A process of a killed run may still execute this task. When it releases the lock, the task is finished.
        with locked(Path(self.logging_dir.resolve_paths(f"{rank:05d}.lock"))):
            return super()._run_for_rank(rank, *arguments, **options)

    def _launch_run_for_rank(self, *arguments: Any, **options: Any) -> Any:
        configure_worker()
        return super()._launch_run_for_rank(*arguments, **options)


def _die_with_parent(_: object) -> None:
    """Ask Linux to kill this process when its parent terminates for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
