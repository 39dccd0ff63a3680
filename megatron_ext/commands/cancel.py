"""Command `selectron cancel`."""

from __future__ import annotations

import argparse
import sys

from megatron_ext.commands.status import add_runs
from megatron_ext.launch import slurm
from megatron_ext.launch.by_hand import newest_manual_start
from megatron_ext.launch.job import Job, is_locally_locked, newest_job
from megatron_ext.launch.ownership import check_ownership
from megatron_ext.launch.status import run_folders
from megatron_ext.run_folder.launch_events import read_events
from megatron_ext.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs."""
    add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Cancel the live jobs of runs. Each saves a checkpoint if Slurm allows the time (KillWait).

    Raises:
        UserError: Slurm rejects it, files of a run are damaged, or a run has no Slurm job. The other jobs are cancelled
            first.
    """
    without_slurm, errors, cancelled = list[str](), list[UserError](), 0
    folders = list(run_folders(args.runs))
    for folder in folders:
        try:
            job = newest_job(folder)
            start = newest_manual_start(folder, job)
            if start is not None and start.is_running:
                raise UserError(str(folder), f"was started by hand: {start.description}", "stop it there with Ctrl-C")
            if job is None or _has_ended_here(job):
                continue
            if job.number is None:
                without_slurm.append(str(folder))
            else:
                cancelled += _cancel_job(job, job.number)
        except UserError as error:  # continue with the other runs
            errors.append(error)
    if without_slurm:
        errors.append(
            UserError(", ".join(without_slurm), "not a Slurm job", "stop it where it was started with Ctrl-C")
        )
    for earlier in errors[:-1]:
        print(f"selectron: error: {earlier}", file=sys.stderr)
    if errors:
        raise errors[-1]
    if not cancelled:
        subject = f"{folders[0]} has no" if len(folders) == 1 else f"none of the {len(folders)} runs has a"
        print(f"nothing was cancelled: {subject} waiting or running job")
    return 0


def _cancel_job(job: Job, number: str) -> bool:
    """Cancel a job if it waits or runs, and print a line about it. Return True if it was cancelled.

    Raises:
        UserError: the job belongs to another folder, or Slurm rejects it.
    """
    state = slurm.job_state(number)
    if state is None or not state.is_alive:
        return False
    check_ownership(job, state)
    slurm.cancel(number)
    print(f"{job.run.name}: job {number} was cancelled", flush=True)
    return True


def _has_ended_here(job: Job) -> bool:
    """Return True if a job was started on this machine without Slurm and no longer trains."""
    has_start_event = any(event.description.startswith("begun with") for event in read_events(job.folder, [])[:1])
    return job.number is None and has_start_event and not is_locally_locked(job.run)
