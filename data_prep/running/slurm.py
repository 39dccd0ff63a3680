"""The stages as a chain of Slurm jobs, each waiting for the one before; the last makes the folder.

A task that fails ends the chain: later jobs never start, and Slurm removes them. A task whose node dies runs again on
another. After either, the same call goes on with what is not finished.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import PipelineStats

from data_prep.running.execution import MEMORY_GB, Execution, Stage, standing
from data_prep.running.slurm_jobs import check_no_jobs, note_job, noted_jobs
from megatron_ext.errors import UserError

MAX_ARRAY = 1001
"""Tasks of an array job that Slurm takes where nothing else is configured. datatrove would submit several arrays and
have the next stage wait for the last of them alone: here, a job runs several tasks instead."""


def submit(
    stages: list[Stage], root: Path, finish: PipelineStep, logs: str, execution: Execution, total_bytes: int
) -> None:
    """Submit stages and what comes after them; tasks that were finished before are not submitted again.

    Args:
        stages: in order.
        root: folder that is filled.
        finish: what makes the folder of all that the stages wrote.
        logs: folder for what the jobs print, a folder a stage: the one that is filled is renamed when they are done.
        execution: partition, time and number of jobs at a time.
        total_bytes: input bytes that a stage reads.

    Raises:
        UserError: Slurm refuses a job, or jobs of an earlier call are at work.
    """
    check_no_jobs(root, lambda: standing(stages, root, total_bytes))
    last = None
    for stage in stages:
        last = _Job(stage.steps, stage.tasks, stage.name, stage.notes(root), root, logs, execution, last)
    merging = _Job([finish], 1, "merging", f"{logs}/merging", root, logs, execution, last, skip_completed=False)
    try:
        merging.run()
    except subprocess.CalledProcessError as error:
        if jobs := noted_jobs(root):  # those before the one refused would wait or work for nothing
            subprocess.run(["scancel", *jobs], check=False)
        problem = f"sbatch ended with code {error.returncode}"
        raise UserError("--executor", problem, "mend what it says above and call again") from None


class _Job(SlurmPipelineExecutor):
    """A stage as one array of jobs."""

    def __init__(
        self,
        pipeline: list[PipelineStep],
        tasks: int,
        name: str,
        notes: str,
        root: Path,
        logs: str,
        execution: Execution,
        before: SlurmPipelineExecutor | None,
        **more: Any,
    ) -> None:
        super().__init__(
            pipeline,
            tasks=tasks,
            time=execution.slurm_time,
            partition=execution.slurm_partition,
            mem_per_cpu_gb=MEMORY_GB,
            workers=min(execution.workers, tasks),
            job_name=f"prepare-{name}",
            qos="",  # that of the user, where datatrove would ask for one called normal
            # The programs of this environment, activated or not.
            env_command=f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
            sbatch_args={"kill-on-invalid-dep": "yes"},  # else jobs behind one that failed are pending for ever
            with_srun=False,  # a task is one process; a node that dies while srun begins would fail it for good
            tasks_per_job=-(-tasks // MAX_ARRAY),
            logging_dir=notes,
            slurm_logs_folder=str(Path(logs).absolute() / name),
            depends=before,
            **more,
        )
        self.root = root

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        """Options of sbatch; in its names of files `%` begins a pattern."""
        log = f"{self.slurm_logs_folder.replace('%', '%%')}/%A_%a.out"
        return {**super().get_sbatch_args(max_array), "output": log, "error": log}

    def get_launch_file_contents(self, sbatch_args: dict[str, Any], run_script: str) -> str:
        """The batch script: datatrove's own, but for quotes around what comes from options and paths."""
        options = [f"--{name}={value}" if value else f"--{name}" for name, value in sbatch_args.items()]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(option)}" for option in options),
            f"echo {shlex.quote(f'Starting data processing job {self.job_name}')}",
            self.env_command,
            "set -xe",
            "export PYTHONUNBUFFERED=TRUE",
            f"launch_pickled_pipeline {shlex.quote(self.logging_dir.resolve_paths('executor.pik'))}",
        ]
        return "\n".join(lines) + "\n"

    def launch_merge_stats(self) -> None:
        """Note the job. Submit none for statistics, which could come to work in a folder that is already renamed."""
        note_job(self.root, self.job_id)

    def _run_for_rank(self, *arguments: Any, **named: Any) -> PipelineStats:
        try:
            return super()._run_for_rank(*arguments, **named)
        except UserError as error:
            print(f"selectron: error: {error}", file=sys.stderr)  # the last line of the job's log
            sys.exit(2)
