"""Command `selectron train`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from megatron_ext.commands import run_config
from megatron_ext.commands.ranks import run_as_ranks, world_size
from megatron_ext.utils import error_reporting, gc_control
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.resume_option import add_resume_option

if TYPE_CHECKING:
    from megatron_ext.config.schema import RunConfig

TRIAL_STEPS = 5
"""Steps of `--trial` by default; the first two include compilation and allocation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration and the options of a start."""
    run_config.add_config(parser)
    parser.add_argument("--processes", type=int, metavar="N", help="processes to start on this machine (default 1)")
    add_resume_option(parser, "continue from the run's newest checkpoint")
    parser.add_argument("--from-step", type=int, metavar="N", help="continue from the checkpoint of this step")
    trial = f"train only N steps (default {TRIAL_STEPS}) in a separate folder and report throughput and memory"
    parser.add_argument("--trial", type=int, nargs="?", const=TRIAL_STEPS, metavar="N", help=trial)
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")


def run(args: argparse.Namespace) -> int:
    """Train a run, or a trial of it.

    Returns:
        Exit code, see `cli.main`.

    Raises:
        UserError: an option or the configuration is invalid; see also `training.run.train`.
    """
    processes = world_size(args.processes)
    # --print-config starts no process. Without a number of them, check for one replica of the model.
    num_ranks = processes or (None if args.print_config else 1)
    full_config = config = run_config.load_checked(args.config, args.overrides, num_ranks)
    if args.trial is not None:
        config = _trial(args, full_config, processes)
    if args.print_config:
        from megatron_ext.config.save import to_yaml

        sys.stdout.write(to_yaml(config))
        return 0

    def train_here() -> int:
        with gc_control.frozen_imports():
            from megatron_ext.training.run import train

        trial_of = None if args.trial is None else full_config
        finished = train(config, resume=args.resume, from_step=args.from_step, trial_of=trial_of)
        return 0 if finished else error_reporting.stop_exit_code()

    return run_as_ranks("train", args.command_line, processes, train_here)


def _trial(args: argparse.Namespace, full_config: RunConfig, processes: int | None) -> RunConfig:
    """Return the configuration of a trial, after the same checks as that of a run."""
    from megatron_ext.config.trial import trial_config

    if args.resume or args.from_step is not None:
        raise UserError("--trial", "a trial starts from initial weights", "omit --resume and --from-step")
    config = trial_config(full_config, args.trial)
    run_config.check(config, processes)
    return config
