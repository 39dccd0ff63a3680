"""Configuration arguments of commands, and configurations read and checked for them.

Torch and Megatron are imported only when a configuration is read, so that help appears at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.utils import gc_control

if TYPE_CHECKING:
    from megatron_ext.config.schema import RunConfig
    from megatron_ext.config.traits import Mixers


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments CONFIG and key=value."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; see examples/")
    override = "override of a field, e.g. training.steps=200, or a YAML file with overrides"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=override)


def load(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Read a configuration without checking its combinations of fields.

    Raises:
        UserError: a field is unknown, a value is out of range, or the optimizer is unknown or does not support the
            sharding.
    """
    from megatron_ext.config.load import load_config

    config = load_config(path, overrides, mixers())
    from megatron_ext.optim.registry import algorithm_of  # after `mixers`, which imports torch faster

    algorithm_of(config.optimizer)
    return config


def check(config: RunConfig, processes: int | None) -> None:
    """Check a configuration for a number of processes; None: as many as one replica of the model needs.

    Raises:
        UserError: fields contradict each other, or a suite or logger is unknown or lacks its package.
    """
    from megatron_ext.config.layout import model_parallel_size
    from megatron_ext.config.rules import check
    from megatron_ext.evaluation.registry import check_suites
    from megatron_ext.training.loggers.core.registry import check_loggers

    check(config, model_parallel_size(config.parallel) if processes is None else processes, mixers())
    check_suites(config)
    check_loggers(config.logging.backends)


def load_checked(path: Path, overrides: Sequence[str], processes: int | None) -> RunConfig:
    """Read and check a configuration, see `load` and `check`."""
    config = load(path, overrides)
    check(config, processes)
    return config


def mixers() -> Mixers:
    """Return the registered mixers by name."""
    with gc_control.frozen_imports():
        from megatron_ext.platform.device import prepare_megatron_import

        prepare_megatron_import()
        from megatron_ext.mixers.core.registry import load_all

        return load_all()
