"""Commands `selectron status`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from megatron_ext.launch import slurm
from megatron_ext.launch.by_hand import ManualStart, manual_start
from megatron_ext.launch.job import Job, is_claimed, newest_job
from megatron_ext.launch.ownership import check_own, is_of_another
from megatron_ext.launch.ranks import ranks_table
from megatron_ext.launch.status import run_folders, status_of, status_table
from megatron_ext.run_folder.heartbeat import signs
from megatron_ext.run_folder.launch_events import read_events
from megatron_ext.run_folder.layout import METRICS
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the run arguments of `selectron status` and `selectron cancel`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of run folders")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `selectron logs`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--follow", action="store_true", help="keep printing new output")
    parser.add_argument("--lines", type=int, default=50, metavar="N", help="number of lines from the end (default 50)")


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `selectron status`."""
    add_runs(parser)
    parser.add_argument(
        "--ranks", action="store_true", help="also show the progress of each rank and which ranks delay the others"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def status(args: argparse.Namespace) -> int:
    """Print the status of runs.

    Raises:
        UserError: a folder contains no run, or Slurm does not respond.
    """
    folders = list(run_folders(args.runs))
    runs = [status_of(folder) for folder in folders]
    if args.json:
        ranks = [{"ranks": [asdict(sign) for sign in signs(folder)]} if args.ranks else {} for folder in folders]
        print(json.dumps([asdict(run) | more for run, more in zip(runs, ranks, strict=True)], indent=1))
        return 0
    print("\n".join(status_table(runs)))
    for folder in folders if args.ranks else ():
        try:
            lines = ranks_table(folder)
        except UserError as error:
            lines = [f"{error.problem}; {error.hint}"]
        print(f"\n{folder}:\n" + "\n".join(lines))
    return 0


def logs(args: argparse.Namespace) -> int:
    """Print the end of the newest job's log.

    Raises:
        UserError: there is no log yet.
    """
    job = newest_job(args.run)
    hand = _manual_start(args.run, job)
    if hand is not None:
        return _show_hands_output(args, hand)
    if job is None:
        raise UserError(str(args.run), "is not a run that has started", "give run.dir/run.name of a run")
    if not job.log.is_file():
        problem = (
            f"job {job.number} has printed nothing yet" if job.number else "its output was printed where it was started"
        )
        raise UserError(str(args.run), problem, f"see `selectron status {args.run}`")
    _warn_of_copy(job)
    return _tail(args, job.log)


def _warn_of_copy(job: Job) -> None:
    """Print a warning if a log is a copy: the job writes to another folder's log."""
    if job.number is None or shutil.which("squeue") is None:
        return
    try:
        state = slurm.job_state(job.number)
    except UserError:  # the log can still be printed
        return
    if state is not None and state.is_alive and is_of_another(job, state):
        said = f"job {job.number} belongs to {printable(str(state.script))}; this log is a copy that no longer grows"
        print(f"selectron: {job.run}: {said}", file=sys.stderr, flush=True)


def _show_hands_output(args: argparse.Namespace, hand: ManualStart) -> int:
    """Print the output file of a run that was started by hand.

    Raises:
        UserError: its output is in no file.
    """
    said = f"was started by hand ({hand.said})"
    if not hand.output or not Path(hand.output).is_file():
        lost = f"output file {hand.output} does not exist" if hand.output else "output was not saved"
        problem = f"{said}, and its {lost}"
        raise UserError(
            str(args.run), problem, f"see {args.run}/{METRICS}, or start it with `selectron launch --local` next time"
        )
    print(f"selectron: {args.run} {said}; its output goes to {printable(hand.output)}", file=sys.stderr, flush=True)
    return _tail(args, Path(hand.output))


def _tail(args: argparse.Namespace, log: Path) -> int:
    follow = ["--follow"] if args.follow else []
    command = ["tail", f"--lines={args.lines}", *follow, "--", str(log)]
    sys.stdout.flush()
    if not sys.stdout.isatty():
        os.execvp("tail", command)
    # On a terminal the output of other processes must go through `EscapedOutput` as well.
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        for line in io.TextIOWrapper(tail.stdout, "utf-8", errors="replace", newline=""):  # progress lines end with \r
            sys.stdout.write(line)
            sys.stdout.flush()
    return tail.returncode


def cancel(args: argparse.Namespace) -> int:
    """Cancel the live jobs of runs. Each saves a checkpoint if Slurm allows the time (KillWait).

    Raises:
        UserError: Slurm rejects it, files of a run are damaged, or a run has no Slurm job. The other jobs are cancelled
            first.
    """
    others, errors, cancelled = list[str](), list[UserError](), 0
    folders = list(run_folders(args.runs))
    for folder in folders:
        try:
            job = newest_job(folder)
            hand = _manual_start(folder, job)
            if hand is not None and hand.is_running:
                raise UserError(str(folder), f"was started by hand: {hand.said}", "stop it there with Ctrl-C")
            if job is None or _has_ended_here(job):
                continue
            if job.number is None:
                others.append(str(folder))
            else:
                cancelled += _is_cancelled(job, job.number)
        except UserError as error:  # continue with the other runs
            errors.append(error)
    if others:
        errors.append(UserError(", ".join(others), "not a Slurm job", "stop it where it was started with Ctrl-C"))
    for found in errors[:-1]:
        print(f"selectron: error: {found}", file=sys.stderr)
    if errors:
        raise errors[-1]
    if not cancelled:
        which = f"{folders[0]} has no" if len(folders) == 1 else f"none of the {len(folders)} runs has a"
        print(f"nothing was cancelled: {which} waiting or running job")
    return 0


def _is_cancelled(job: Job, number: str) -> bool:
    """Cancel a job if it waits or runs, and print so. Return True if it was cancelled.

    Raises:
        UserError: the job belongs to another folder, or Slurm rejects it.
    """
    state = slurm.job_state(number)
    if state is None or not state.is_alive:
        return False
    check_own(job, state)
    slurm.cancel(number)
    print(f"{job.run.name}: job {number} was cancelled", flush=True)
    return True


def _manual_start(run: Path, job: Job | None) -> ManualStart | None:
    """Return the newest start of a run by hand if it is later than the last event of its newest job, else None."""
    events = [] if job is None else read_events(job.folder, [])
    return manual_start(run, None if job is None else events[-1].time if events else "")


def _has_ended_here(job: Job) -> bool:
    """Return True if a job was started on this machine without Slurm and no longer trains."""
    begun = any(event.what.startswith("begun with") for event in read_events(job.folder, [])[:1])
    return job.number is None and begun and not is_claimed(job.run)
