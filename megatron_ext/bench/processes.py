"""Configuration and process groups for benchmarks of a run, in one process or in those that torchrun started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.schema import RunConfig
    from megatron_ext.platform.device import Platform

VOCABULARY = 50304


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a run on random tokens."""
    add_config_options(parser)
    add = parser.add_argument
    add("--vocabulary", type=int, default=VOCABULARY, metavar="N", help="vocabulary size of the model (%(default)s)")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the configuration."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="YAML file, see examples/; its data is not read by default")
    override = "e.g. parallel.tensor=2 training.global_batch_size=64; or another YAML file, which overrides the first"
    add("overrides", nargs="*", metavar="key=value", help=override)


def load_run_config(args: argparse.Namespace, extra_overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check the run's configuration.

    Args:
        args: see `add_run_options`.
        extra_overrides: overrides applied after those of the command line.

    Raises:
        UserError: the run is not possible.
    """
    from megatron_ext.config.load import load_config
    from megatron_ext.config.rules import check
    from megatron_ext.mixers.core.registry import load_all

    config = load_config(args.config, [*args.overrides, *extra_overrides], load_all())
    check(config, world_size(), load_all())
    return config


def run_identity(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a report that identify the run; see `RunReport`."""
    return {"name": args.config.stem, "overrides": tuple(args.overrides), "processes": world_size()}


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return True if this process writes the report."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def process_groups(config: RunConfig, platform: Platform) -> Iterator[ProcessGroupCollection]:
    """Context manager that yields the process groups of torchrun's processes, or of this one alone."""
    import torch.distributed as dist

    from megatron_ext.parallel.groups import groups_of_one_process, make_process_groups
    from megatron_ext.platform.device import start_process_group

    if "RANK" not in os.environ:
        with groups_of_one_process(platform.communication) as groups:
            yield groups
        return
    start_process_group(platform)
    try:
        yield make_process_groups(config.parallel, config.training.seed)
    finally:
        dist.destroy_process_group()
