"""Options of `selectron bench checkpoints`, for one process or those that torchrun started."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from kernels.bench.arguments import require_positive
from megatron_ext.bench.processes import add_run_options, load_run_config, process_groups, run_identity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_run_options(parser)
    add = parser.add_argument
    add("--steps", type=int, default=10, metavar="N", help="steps timed without a save (%(default)s)")
    add("--saves", type=int, default=5, metavar="N", help="timed saves of each kind (%(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("bench/checkpoints"),
        metavar="DIR",
        help="folder of the report (%(default)s)",
    )
    add("--disk", type=Path, metavar="DIR", help="folder for temporary checkpoints (--output)")


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its table on the first rank; return 0.

    Raises:
        UserError: the configuration is invalid, or the disk is full.
        OptionError: an option or the output folder is invalid.
    """
    steps, saves = require_positive("--steps", args.steps), require_positive("--saves", args.saves)
    vocabulary = require_positive("--vocabulary", args.vocabulary)
    config = load_run_config(args)
    from kernels.bench.bench_report import describe_machine
    from megatron_ext.bench.checkpoints.report import CheckpointReport, host
    from megatron_ext.bench.checkpoints.run import CheckpointBenchmark
    from megatron_ext.bench.run_report import publish
    from megatron_ext.platform.device import platform_for_run

    platform = platform_for_run(config.run.device, config.parallel)
    root = (args.disk or args.output) / ".checkpoints"
    with process_groups(config, platform) as groups:
        try:
            measured = CheckpointBenchmark(config, vocabulary, groups, platform, root).measure(steps, saves)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    machine = describe_machine(platform.device) | host()
    publish(CheckpointReport(**run_identity(args), machine=machine, measured=measured), args.output)
    return 0
