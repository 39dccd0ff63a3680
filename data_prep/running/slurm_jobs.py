"""Which Slurm jobs fill a folder: noted as they are submitted, so that no other call fills it while they do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from data_prep.storage import WORK_NAME
from megatron_ext.errors import UserError

JOBS_NAME = "slurm_jobs"


def note_job(root: Path, job: str) -> None:
    """Note a job that fills `root`."""
    with (root / WORK_NAME / JOBS_NAME).open("a") as file:
        file.write(f"{job}\n")


def noted_jobs(root: Path) -> list[str]:
    """The jobs that were submitted to fill `root`, those that have ended too."""
    note = root / WORK_NAME / JOBS_NAME
    return note.read_text().split() if note.exists() else []


def check_no_jobs(root: Path, standing: Callable[[], str]) -> None:
    """Refuse to fill what Slurm jobs of an earlier call still fill; forget those that have ended.

    The call that is refused is how a user asks where the jobs are: nothing else shows it.

    Args:
        root: folder that is filled.
        standing: says where its jobs are.

    Raises:
        UserError: there are such jobs, or Slurm cannot be asked about them.
    """
    jobs = noted_jobs(root)
    if not jobs:
        return
    try:
        # All of the user's: asked about jobs by number, Slurm fails where it has forgotten one.
        command = ["squeue", "--noheader", "--me", "--format=%A %F"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        problem = f"was handed to Slurm jobs {','.join(jobs)}, and squeue cannot be asked about them ({error})"
        raise UserError(str(root), problem, "call on a Slurm login node") from None
    running = [job for job in jobs if job in listed.split()]
    if running:
        numbers = " ".join(running)
        problem = f"is being written by Slurm jobs {numbers}, {standing()}"
        raise UserError(str(root), problem, f"wait, or stop them: scancel {numbers}")
    (root / WORK_NAME / JOBS_NAME).unlink()
