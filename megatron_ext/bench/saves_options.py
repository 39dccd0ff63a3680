"""Options of `selectron bench checkpoints`; one process, or as many as torchrun has started."""

from __future__ import annotations

import argparse
import shutil
from functools import partial
from pathlib import Path

from kernels.bench.arguments import at_least_one, save_into
from megatron_ext.bench.processes import add_run, config_of_run, is_first, process_groups, world_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    add = parser.add_argument
    add("--steps", type=int, default=10, metavar="N", help="timed without a save (%(default)s)")
    add("--saves", type=int, default=5, metavar="N", help="timed of each kind (%(default)s)")
    add("--output", type=Path, default=Path("bench/checkpoints"), metavar="DIR", help="of the report (%(default)s)")
    add("--disk", type=Path, metavar="DIR", help="where checkpoints are written and removed again (--output)")


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its table on the first rank. Returns 0.

    Raises:
        UserError: the configuration does not allow it, or the disk is full.
        OptionError: an option or the output folder does not.
    """
    steps, saves = at_least_one("--steps", args.steps), at_least_one("--saves", args.saves)
    vocabulary = at_least_one("--vocabulary", args.vocabulary)
    config = config_of_run(args)
    from kernels.bench.report import describe_machine
    from megatron_ext.bench import saves_report as report
    from megatron_ext.bench.saves import Bench
    from megatron_ext.platform import local_rank, select_platform

    platform = select_platform(config.run.device, local_rank())
    root = (args.disk or args.output) / ".checkpoints"
    with process_groups(config, platform) as groups:
        try:
            measured = Bench(config, vocabulary, groups, platform, root).measure(steps, saves)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    if is_first():
        done = report.Report(
            name=args.config.stem,
            overrides=tuple(args.overrides),
            processes=world_size(),
            machine=describe_machine(platform.device) | report.host(),
            measured=measured,
        )
        save_into(args.output, partial(report.write, done))
        print(report.markdown(done))
    return 0
