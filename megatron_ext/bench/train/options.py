"""Options of `selectron bench train`, which starts its own processes."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.bench.arguments import print_progress, require_positive, save_into
from kernels.bench.cases import OptionError
from megatron_ext.bench.processes import VOCABULARY, add_config_options, run_identity
from megatron_ext.utils import gc_control
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.bench.train.report import TrainingReport
    from megatron_ext.bench.train.run import TrainingPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_config_options(parser)
    add = parser.add_argument
    variant = "a row of the table, e.g. full:model.pattern=attention*24 or mamba2:examples/mixers/1p3b/mamba2.yaml"
    add("--variant", action="append", default=[], metavar="NAME:key=value,...", help=f"{variant}; repeatable")
    plain = "a row before the variants: megatron-core's own GPT of these sizes, with attention"
    add("--plain", action="append", default=[], metavar="NAME:key=value,...", help=f"{plain}; repeatable")
    add("--processes", type=int, default=1, metavar="N", help="processes per variant (%(default)s)")
    add("--steps", type=int, default=10, metavar="N", help="timed steps (%(default)s)")
    add("--warmup", type=int, default=5, metavar="N", help="untimed steps before them (%(default)s)")
    add("--profile", type=int, default=2, metavar="N", help="profiled steps after the timed ones (%(default)s)")
    add(
        "--data",
        choices=("random", "prepared"),
        default="random",
        help="prepared: data of the configuration (%(default)s)",
    )
    add(
        "--vocabulary",
        type=int,
        metavar="N",
        help=f"vocabulary size of the model ({VOCABULARY}; with prepared data: that of the data)",
    )
    add("--output", type=Path, default=Path("bench/train"), metavar="DIR", help="folder of the report (%(default)s)")


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a rank, which `run` starts."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", action="store_true")

    def measure(args: argparse.Namespace) -> int:
        with gc_control.frozen_imports():
            from megatron_ext.bench.train import rank as train_rank

        return train_rank.run_rank(args.folder, only_machine=args.machine)

    parser.set_defaults(measure=measure)


def make_plan(args: argparse.Namespace) -> TrainingPlan:
    """Check the options and return the settings.

    Raises:
        OptionError: an option has an invalid value.
        UserError: this process was started by a launcher.
    """
    if "RANK" in os.environ:
        hint = "run the command without a launcher, with --processes"
        raise UserError("RANK", "is set by a launcher, but this command starts its own processes", hint)
    require_positive("--processes", args.processes)
    require_positive("--steps", args.steps)
    require_positive("--warmup", args.warmup)
    if args.profile < 0:
        raise OptionError("--profile", f"{args.profile} is less than 0", "give 0 or more")
    prepared, vocabulary = args.data == "prepared", args.vocabulary
    if vocabulary is not None:
        require_positive("--vocabulary", vocabulary)
    from megatron_ext.bench.train.measure import StepCounts
    from megatron_ext.bench.train.run import TrainingPlan

    return TrainingPlan(
        processes=args.processes,
        step_counts=StepCounts(warm_up=args.warmup, steps=args.steps, profiled=args.profile),
        vocabulary=VOCABULARY if vocabulary is None and not prepared else vocabulary,
        prepared=prepared,
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its tables.

    Returns:
        0, or 1 if a variant failed.

    Raises:
        UserError: the configuration cannot be read, or cannot be trained and there are no variants.
        OptionError: an option or the output folder is invalid.
    """
    plan = make_plan(args)
    from megatron_ext.bench.train import run as train

    variants = train.read_variants(args.config, args.overrides, args.variant, plan.processes, args.plain)

    def save(report: TrainingReport) -> None:
        save_into(args.output, partial(type(report).write, report))

    identity = run_identity(args) | {"processes": plan.processes}
    report, code = train.bench(variants, plan, identity, report_progress=print_progress, save=save)
    print(report.markdown())
    print(f"written: {args.output}")
    return code
