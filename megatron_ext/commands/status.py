"""Command `selectron status`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megatron_ext.launch.ranks import ranks_table
from megatron_ext.launch.status import run_folders, status_of, status_table
from megatron_ext.run_folder.heartbeat import read_heartbeats
from megatron_ext.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the options of the output."""
    add_runs(parser)
    parser.add_argument(
        "--ranks", action="store_true", help="also show the progress of each rank and which ranks delay the others"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN, which may be repeated."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of run folders")


def run(args: argparse.Namespace) -> int:
    """Print the status of runs.

    Raises:
        UserError: a folder contains no run, or Slurm does not respond.
    """
    folders = list(run_folders(args.runs))
    runs = [status_of(folder) for folder in folders]
    if args.json:
        ranks = [
            {"ranks": [asdict(sign) for sign in read_heartbeats(folder)]} if args.ranks else {} for folder in folders
        ]
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
