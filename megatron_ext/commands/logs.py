"""Command `selectron logs`."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_ext.launch import slurm
from megatron_ext.launch.by_hand import ManualStart, newest_manual_start
from megatron_ext.launch.job import Job, newest_job
from megatron_ext.launch.ownership import belongs_to_other_folder
from megatron_ext.run_folder.layout import METRICS
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run and the options of the output."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--follow", action="store_true", help="keep printing new output")
    parser.add_argument("--lines", type=int, default=50, metavar="N", help="number of lines from the end (default 50)")


def run(args: argparse.Namespace) -> int:
    """Print the end of the newest job's log.

    Raises:
        UserError: there is no log yet.
    """
    job = newest_job(args.run)
    start = newest_manual_start(args.run, job)
    if start is not None:
        return _show_manual_output(args, start)
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
    """Print a warning if the log is a copy, because the job writes to the log of another folder."""
    if job.number is None or shutil.which("squeue") is None:
        return
    try:
        state = slurm.job_state(job.number)
    except UserError:  # the log can still be printed
        return
    if state is not None and state.is_alive and belongs_to_other_folder(job, state):
        message = f"job {job.number} belongs to {printable(str(state.script))}; this log is a copy that no longer grows"
        print(f"selectron: {job.run}: {message}", file=sys.stderr, flush=True)


def _show_manual_output(args: argparse.Namespace, start: ManualStart) -> int:
    """Print the output file of a run that was started by hand.

    Raises:
        UserError: its output was not saved, or the file does not exist.
    """
    description = f"was started by hand ({start.description})"
    if not start.output or not Path(start.output).is_file():
        missing = f"output file {start.output} does not exist" if start.output else "output was not saved"
        problem = f"{description}, and its {missing}"
        raise UserError(
            str(args.run), problem, f"see {args.run}/{METRICS}, or start it with `selectron launch --local` next time"
        )
    message = f"{description}; its output goes to {printable(start.output)}"
    print(f"selectron: {args.run} {message}", file=sys.stderr, flush=True)
    return _tail(args, Path(start.output))


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
