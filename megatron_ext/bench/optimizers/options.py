"""Options of `selectron bench optimizers`, for one process or those that torchrun started."""

from __future__ import annotations

import argparse
from pathlib import Path

from kernels.bench.arguments import require_positive, split_list
from megatron_ext.bench.processes import add_run_options, load_run_config, process_groups, run_identity
from megatron_ext.utils.errors import UserError

DEFAULT = "megatron,zero1,zero2,zero3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_run_options(parser)
    add = parser.add_argument
    add("--optimizers", default=DEFAULT, metavar="A,B,...", help="values of optimizer.sharding (%(default)s)")
    add(
        "--rounds",
        type=int,
        default=6,
        metavar="N",
        help="number of rounds; each optimizer runs once per round (%(default)s)",
    )
    add("--steps", type=int, default=10, metavar="N", help="timed steps per round (%(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("bench/optimizers"),
        metavar="DIR",
        help="folder of the report (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its table on the first rank; return 0.

    Raises:
        UserError: the configuration is invalid.
        OptionError: an option or the output folder is invalid.
    """
    rounds, steps = require_positive("--rounds", args.rounds), require_positive("--steps", args.steps)
    vocabulary, names = require_positive("--vocabulary", args.vocabulary), split_list(args.optimizers)
    if not names:
        raise UserError("--optimizers", "no optimizer is given", f"give e.g. {DEFAULT}")
    configs = {name: load_run_config(args, [f"optimizer.sharding={name}"]) for name in names}
    from kernels.bench.bench_report import describe_machine
    from megatron_ext.bench.optimizers import run as optimizers
    from megatron_ext.bench.run_report import publish
    from megatron_ext.platform.device import platform_for_run

    first = next(iter(configs.values()))
    platform = platform_for_run(first.run.device, first.parallel)
    with process_groups(first, platform) as groups:
        seconds = optimizers.measure(configs, vocabulary, groups, platform, rounds=rounds, steps=steps)
    report = optimizers.OptimizerReport(
        **run_identity(args), machine=describe_machine(platform.device), steps=steps, seconds=seconds
    )
    publish(report, args.output)
    return 0
