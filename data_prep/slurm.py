"""The stages as a chain of Slurm jobs, each waiting for the one before; the last makes the folder."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep.execution import MEMORY_GB, Execution, Stage
from megatron_ext.errors import UserError


def submit(stages: list[Stage], root: Path, finish: PipelineStep, logs: str, execution: Execution) -> None:
    """Submit stages and what comes after them; tasks that were finished before are not submitted again.

    Args:
        stages: in order.
        root: folder that is filled.
        finish: what makes the folder of all that the stages wrote.
        logs: folder for what the last job notes: that of the stages is gone when it is done.
        execution: partition, time and number of jobs at a time.

    Raises:
        UserError: Slurm refuses a job.
    """
    last = None
    for stage in stages:
        last = _ChainedExecutor(stage.steps, stage.tasks, stage.notes(root), f"prepare-{stage.name}", execution, last)
    merging = _ChainedExecutor([finish], 1, logs, "prepare-merging", execution, last, skip_completed=False)
    try:
        merging.run()
    except subprocess.CalledProcessError as error:
        problem = f"sbatch ended with code {error.returncode}"
        raise UserError("--executor", problem, "mend what it says above and call again") from None


class _ChainedExecutor(SlurmPipelineExecutor):
    def __init__(
        self,
        pipeline: list[PipelineStep],
        tasks: int,
        notes: str,
        name: str,
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
            job_name=name,
            qos="",  # that of the user, where datatrove would ask for one called normal
            logging_dir=notes,
            depends=before,
            **more,
        )

    def launch_merge_stats(self) -> None:
        """Submit no further job for statistics, which could come to work in a folder that is already renamed."""
