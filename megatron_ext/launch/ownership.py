"""Check that a Slurm job belongs to a job folder. A copied folder contains the job number of the original."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_ext.launch import slurm
from megatron_ext.launch.array import Array
from megatron_ext.launch.job import SCRIPT, Job
from megatron_ext.launch.slurm import JobState
from megatron_ext.utils.errors import UserError


def belongs_to_other_folder(job: Job, state: JobState) -> bool:
    """Return True if the Slurm job with a job's number was submitted from another folder than the job's.

    Folders are compared by inode, because several paths may lead to one folder. Files are not compared, because the
    files of a copy may be hard links.

    Args:
        job: job with a number.
        state: state of the Slurm job with this number.
    """
    if state.script is None:
        return False
    script = Path(state.script)
    number, _, task = (job.number or "").partition("_")
    try:
        if not script.is_absolute() or not number:
            return True
        if not task:
            return script.name != SCRIPT or not _is_same_job_folder(script.parent, job.folder)
        task_job = Array(script.parent).jobs[int(task)]
        return not _is_same_job_folder(task_job.folder, job.folder)
    except (OSError, UserError, IndexError):  # cannot be determined if the original was moved or removed
        return True


def _is_same_job_folder(folder: Path, other: Path) -> bool:
    """Return True if two job folders, RUN/launch/N, are the same folder in the same run."""
    return os.path.samefile(folder, other) and os.path.samefile(folder.parents[1], other.parents[1])


def own_state(job: Job | None) -> JobState | None:
    """Return the state of a job in Slurm.

    Returns:
        None if the job has no number, Slurm no longer lists it, or the Slurm job belongs to another folder.

    Raises:
        UserError: Slurm does not respond, or the job's number cannot be read.
    """
    if job is None or job.number is None:
        return None
    state = slurm.job_state(job.number)
    return None if state is None or belongs_to_other_folder(job, state) else state


def check_ownership(job: Job, state: JobState) -> None:
    """Check that a Slurm job belongs to the folder of `job`, before the Slurm job is changed.

    Raises:
        UserError: the Slurm job belongs to another folder.
    """
    if belongs_to_other_folder(job, state):
        problem = f"job {job.number} belongs to {state.script}, not to this folder, which was copied or moved"
        raise UserError(str(job.run), problem, f"cancel that run, or use `scancel {job.number}` to cancel that job")
