"""Command `selectron report`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the output."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders to compare, or folders of run folders"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="output folder of the report")
    parser.add_argument(
        "--match",
        choices=["training", "validation"],
        default="training",
        help="compare runs at equal training loss, as the study does, or at equal in-domain validation loss, which is "
        "the loss on new text even where training text was repeated (default: training)",
    )
    parser.add_argument("--fit", action="store_true", help="also fit scaling laws to the runs, as `selectron fit` does")


def run(args: argparse.Namespace) -> int:
    """Write the report, see `analysis.report.write_report`.

    Returns:
        0.
    """
    from megatron_ext.analysis.report import write_report

    write_report(args.runs, args.output, match=args.match, fit=args.fit, say=print)
    return 0
