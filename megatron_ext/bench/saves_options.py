"""Options of `selectron bench checkpoints`; one process, or as many as torchrun has started."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.bench.arguments import at_least_one, save_into

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.schema import RunConfig
    from megatron_ext.platform import Platform

VOCABULARY = 50304


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="YAML file, see examples/; its data are not read")
    add("overrides", nargs="*", metavar="key=value", help="e.g. parallel.tensor=2 training.global_batch_size=64")
    add("--steps", type=int, default=10, metavar="N", help="timed without a save (%(default)s)")
    add("--saves", type=int, default=5, metavar="N", help="timed of each kind (%(default)s)")
    add("--vocabulary", type=int, default=VOCABULARY, metavar="N", help="tokens of the model (%(default)s)")
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
    config = _config(args)
    from kernels.bench.report import describe_machine
    from megatron_ext.bench import saves_report as report
    from megatron_ext.bench.saves import Bench
    from megatron_ext.platform import local_rank, select_platform

    platform = select_platform(config.run.device, local_rank())
    root = (args.disk or args.output) / ".checkpoints"
    with _groups(config, platform) as groups:
        try:
            measured = Bench(config, vocabulary, groups, platform, root).measure(steps, saves)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    if int(os.environ.get("RANK", "0")) == 0:
        done = report.Report(
            name=args.config.stem,
            overrides=tuple(args.overrides),
            processes=_world_size(),
            machine=describe_machine(platform.device) | report.host(),
            measured=measured,
        )
        save_into(args.output, partial(report.write, done))
        print(report.markdown(done))
    return 0


@contextmanager
def _groups(config: RunConfig, platform: Platform) -> Iterator[ProcessGroupCollection]:
    """Of the processes that torchrun has started, or of this one."""
    import torch.distributed as dist

    from megatron_ext.parallel.groups import groups_of_one_process, make_process_groups
    from megatron_ext.platform import start_process_group

    if "RANK" not in os.environ:
        with groups_of_one_process(platform.communication) as groups:
            yield groups
        return
    start_process_group(platform)
    try:
        yield make_process_groups(config.parallel, config.training.seed)
    finally:
        dist.destroy_process_group()


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _config(args: argparse.Namespace) -> RunConfig:
    from megatron_ext.config.load import load_config
    from megatron_ext.config.rules import check
    from megatron_ext.mixers.registry import load_all

    config = load_config(args.config, args.overrides, load_all())
    check(config, _world_size(), load_all())
    return config
