"""Whether a job of Slurm's belongs to the run whose folder names its number: a copied folder names the original's."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.launch import slurm
from megatron_ext.launch.array import Array
from megatron_ext.launch.job import SCRIPT, Job
from megatron_ext.launch.slurm import JobState


def is_of_another(job: Job, state: JobState) -> bool:
    """Whether the script that Slurm runs under a job's number is of another folder than this job's.

    Folders are compared, not paths or files: the same folder may be reached by several paths, and the files of a copy
    may be hard links.

    Args:
        job: with a number.
        state: of the job that has this number.
    """
    if state.script is None:
        return False
    script = Path(state.script)
    number, _, task = (job.number or "").partition("_")
    try:
        if not script.is_absolute() or not number:
            return True
        if not task:
            return script.name != SCRIPT or not _is_same(script.parent, job.folder)
        of_task = Array(script.parent).jobs[int(task)]
        return not _is_same(of_task.folder, job.folder)
    except (OSError, UserError, IndexError):  # where the original was moved or removed, nobody can tell
        return True


def _is_same(folder: Path, other: Path) -> bool:
    """Whether two folders of jobs, RUN/launch/N, are the same in the same run."""
    return os.path.samefile(folder, other) and os.path.samefile(folder.parents[1], other.parents[1])


def own_state(job: Job | None) -> JobState | None:
    """What Slurm knows of a job; None where it has none, has forgotten it, or the job is another folder's.

    Raises:
        UserError: Slurm does not answer, or the job's number cannot be read.
    """
    if job is None or job.number is None:
        return None
    state = slurm.job_state(job.number)
    return None if state is None or is_of_another(job, state) else state


def check_own(job: Job, state: JobState) -> None:
    """Refuse to touch a job that is another folder's.

    Raises:
        UserError: it is.
    """
    if is_of_another(job, state):
        problem = f"job {job.number} runs {state.script}, which is not this folder's: it was copied or moved"
        raise UserError(str(job.run), problem, f"cancel that run, or call `scancel {job.number}` if you mean that job")
