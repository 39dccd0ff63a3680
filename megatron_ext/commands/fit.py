"""Command `selectron fit`: arguments, execution and output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.analysis.scaling.points import Points
    from megatron_ext.analysis.scaling.run_points import RunPoints

DEPRECATED_OPTIONS = ("--bootstrap", "--seed")
"""Deprecated options of an earlier bootstrap, which have no effect."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    columns = "a CSV file with the columns params, tokens and loss, and optionally mixer and test_loss"
    add("points", type=Path, nargs="+", metavar="RUN|CSV", help=f"run folders, folders of run folders, or {columns}")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for fit.json, fit.md and plots")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    without = "count the parameters of runs without embeddings and output layer"
    add("--without-embeddings", action="store_true", help=without)
    highest = "drop the N highest losses of each mixer (default %(default)s)"
    add("--drop-highest", type=int, default=0, metavar="N", help=highest)
    for option in DEPRECATED_OPTIONS:  # accepted, because scripts may still pass them
        add(option, type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Fit laws, write the results and print them.

    Args:
        args: arguments declared by `add_arguments`.

    Returns:
        The exit code.

    Raises:
        UserError: an option is out of range, the points cannot be read, or a law cannot be fitted to them.
    """
    for option in DEPRECATED_OPTIONS:
        if getattr(args, option.lstrip("-")) is not None:
            print(f"warning: {option} has no effect: intervals are computed without random draws", file=sys.stderr)
    if args.drop_highest < 0:
        raise UserError("--drop-highest", f"{args.drop_highest} is below 0", "give 0 to keep all points")
    where, points, runs = _read_points(args.points, embeddings=not args.without_embeddings)
    # Imports matplotlib and SciPy, which takes a second: only after the points have been read.
    from megatron_ext.analysis.scaling.fit_output import format_markdown, to_dict, write_fit
    from megatron_ext.analysis.scaling.fitting import Options, fit_all

    result = fit_all(points, where, Options(args.drop_highest), runs)
    write_fit(result, args.output, keep=args.points[0])
    print(json.dumps(to_dict(result), indent=1) if args.json else format_markdown(result))
    return 0


def _read_points(paths: Sequence[Path], *, embeddings: bool) -> tuple[str, dict[str, Points], RunPoints]:
    """Return the source's name for messages, the points by mixer, and their runs (empty for a CSV file)."""
    from megatron_ext.analysis.scaling.points import read_points
    from megatron_ext.analysis.scaling.run_points import RunPoints, by_mixer, read_run_points

    files = [path for path in paths if path.is_file() or path.suffix.lower() == ".csv"]
    if not files:
        runs = read_run_points(paths, embeddings=embeddings)
        return ", ".join(map(str, paths)), by_mixer(runs), runs
    if len(paths) > 1:
        raise UserError(
            str(files[0]), "cannot be combined with other arguments", "give a single CSV file, or only run folders"
        )
    if not embeddings:
        raise UserError("--without-embeddings", "has no effect on a CSV file", "give that number in its column params")
    return str(files[0]), read_points(files[0]), RunPoints()
