"""Record of the Slurm jobs that fill a folder, which prevents other runs from filling it at the same time."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from data_prep.storage import WORK_NAME
from megatron_ext.utils.errors import UserError

JOBS_NAME = "slurm_jobs"


def record_job(root: Path, job: str) -> None:
    """Record a job that fills `root`."""
    with (root / WORK_NAME / JOBS_NAME).open("a") as file:
        file.write(f"{job}\n")


def recorded_jobs(root: Path) -> list[str]:
    """Return all jobs that were submitted to fill `root`, including those that have ended."""
    path = root / WORK_NAME / JOBS_NAME
    return path.read_text().split() if path.exists() else []


def check_no_jobs(root: Path, progress: Callable[[], str]) -> None:
    """Raise if Slurm jobs of an earlier run still fill a folder. If all have ended, remove their record.

    The error message shows the user the progress of the jobs.

    Args:
        root: folder being filled.
        progress: function that returns a description of the jobs' progress.

    Raises:
        UserError: a recorded job has not ended, or Slurm cannot be queried.
    """
    jobs = recorded_jobs(root)
    if not jobs:
        return
    try:
        # All jobs of the user are listed, because a query by id fails if Slurm no longer has one of the jobs.
        command = ["squeue", "--noheader", "--me", "--format=%A %F"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        problem = f"may still be written by Slurm jobs {','.join(jobs)}, and squeue failed ({error})"
        raise UserError(str(root), problem, "run the command on a Slurm login node") from None
    running = [job for job in jobs if job in listed.split()]
    if running:
        job_ids = " ".join(running)
        problem = f"is being written by Slurm jobs {job_ids}, {progress()}"
        raise UserError(str(root), problem, f"wait for them, or cancel them: scancel {job_ids}")
    (root / WORK_NAME / JOBS_NAME).unlink()
