"""Stages as a chain of Slurm jobs, each depending on the previous job; the last job creates the folder.

A task that fails ends the chain: later jobs never start, and Slurm removes them. The same command then resumes the
unfinished work. A task whose node dies runs again on another node.
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

from data_prep.running.execution import MEMORY_GB, Execution, Stage, progress_text
from data_prep.running.slurm_jobs import check_no_jobs, record_job, recorded_jobs
from megatron_ext.utils.errors import UserError

MAX_ARRAY = 1001
"""Maximum number of jobs in an array in Slurm's default configuration. For more tasks, datatrove would submit several
arrays, and the next stage would depend only on the last array. Here, each job runs several tasks instead."""


def submit(
    stages: list[Stage], root: Path, finish: PipelineStep, logs: str, execution: Execution, total_bytes: int
) -> None:
    """Submit the stages and the final step. Tasks that already finished are not submitted again.

    Args:
        stages: stages in order.
        root: folder being filled.
        finish: step that creates the final folder from the outputs of the stages.
        logs: folder for the output of the jobs, with one folder per stage. It is outside `root`, because `root` is
            renamed at the end.
        execution: partition, time limit and number of concurrent jobs.
        total_bytes: input bytes that a stage with a progress board reads.

    Raises:
        UserError: Slurm refuses a job, or jobs of an earlier run are still active.
    """
    check_no_jobs(root, lambda: progress_text(stages, root, total_bytes))
    last = None
    for stage in stages:
        last = _Job(stage.steps, stage.tasks, stage.name, stage.log_folder(root), root, logs, execution, last)
    merging = _Job([finish], 1, "merging", f"{logs}/merging", root, logs, execution, last, skip_completed=False)
    try:
        merging.run()
    except subprocess.CalledProcessError as error:
        if jobs := recorded_jobs(root):  # the result of the earlier jobs would not be used
            subprocess.run(["scancel", *jobs], check=False)
        problem = f"sbatch failed with exit code {error.returncode}"
        raise UserError("--executor", problem, "fix the error printed above and rerun the command") from None


class _Job(SlurmPipelineExecutor):
    """Executor that submits a stage as one array job."""

    def __init__(
        self,
        pipeline: list[PipelineStep],
        tasks: int,
        name: str,
        log_folder: str,
        root: Path,
        logs: str,
        execution: Execution,
        previous: SlurmPipelineExecutor | None,
        **options: Any,
    ) -> None:
        super().__init__(
            pipeline,
            tasks=tasks,
            time=execution.slurm_time,
            partition=execution.slurm_partition,
            mem_per_cpu_gb=MEMORY_GB,
            workers=min(execution.workers, tasks),
            job_name=f"prepare-{name}",
            qos="",  # the user's default quality of service; datatrove would request one called `normal`
            # Finds the programs of this Python environment, whether it is activated or not.
            env_command=f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
            sbatch_args={"kill-on-invalid-dep": "yes"},  # otherwise jobs after a failed job stay pending forever
            with_srun=False,  # not needed for one process, and a node that dies while srun starts would fail the task
            tasks_per_job=-(-tasks // MAX_ARRAY),
            logging_dir=log_folder,
            slurm_logs_folder=str(Path(logs).absolute() / name),
            depends=previous,
            **options,
        )
        self.root = root

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        """Return the options of sbatch, with `%` in file names escaped, since sbatch interprets it as a pattern."""
        log = f"{self.slurm_logs_folder.replace('%', '%%')}/%A_%a.out"
        return {**super().get_sbatch_args(max_array), "output": log, "error": log}

    def get_launch_file_contents(self, sbatch_args: dict[str, Any], run_script: str) -> str:
        """Return the batch script: datatrove's own, with quotes around values from options and paths."""
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
        """Record the job. No statistics job is submitted, because it might run after the folder is renamed."""
        record_job(self.root, self.job_id)

    def _run_for_rank(self, *arguments: Any, **options: Any) -> PipelineStats:
        try:
            return super()._run_for_rank(*arguments, **options)
        except UserError as error:
            print(f"selectron: error: {error}", file=sys.stderr)  # the last line of the job's log
            sys.exit(2)
