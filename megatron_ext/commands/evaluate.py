"""Sub-command `evaluate`: its arguments, validated before anything starts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.commands.ranks import run_as_ranks, world_size
from megatron_ext.evaluation.registry import SUITES, check_names, read_overrides
from megatron_ext.run_folder.layout import CHECKPOINTS, parse_step_name
from megatron_ext.utils.errors import UserError

OVERRIDABLE_FIELDS = re.compile(
    r"parallel\.\w+|run\.(device|backend)|training\.micro_batch_size|data\.(path|cache_dir|cache_gib|verify|train_domains|test_domains|seq_length)"
)
"""Fields that an evaluation may override, because they do not change the trained model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run or of one of its checkpoints")
    fields = "field of a suite, e.g. domains.sequences=64, or of the run, e.g. parallel.tensor=2 data.path=DIR"
    add("overrides", nargs="*", metavar="key=value", help=fields)
    add(
        "--suite",
        default="domains",
        metavar="NAMES",
        help=f"suites, separated by commas: {', '.join(SUITES)} (default %(default)s)",
    )
    add("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the results (default: evaluation/step_N in the run folder)",
    )
    add("--processes", type=int, metavar="N", help="number of processes to start on this machine (default 1)")


def run(args: argparse.Namespace) -> int:
    """Evaluate a run on the ranks of a process group.

    Returns:
        Exit code.

    Raises:
        UserError: an option or the run is invalid.
    """
    return run_as_ranks("evaluate", args.command_line, world_size(args.processes), build_work(args))


def build_work(args: argparse.Namespace) -> Callable[[], None]:
    """Validate the arguments and return the function that each rank runs.

    Args:
        args: see `add_arguments`.

    Raises:
        UserError: a suite or a field does not exist, or a value is out of range.
    """
    names = [name.strip() for name in args.suite.split(",")]
    check_names("--suite", names)
    suite_overrides, run_overrides = _split_overrides(args.overrides, names)
    suites = {name: read_overrides(name, suite_overrides[name]) for name in dict.fromkeys(names)}
    folder, step = _split_checkpoint_path(args.run, args.step)
    return partial(_evaluate, folder, suites, step, run_overrides, args.output)


def _evaluate(
    folder: Path, suites: dict[str, Any], step: int | None, overrides: Sequence[str], output: Path | None
) -> None:
    from megatron_ext.platform.device import prepare_megatron_import

    prepare_megatron_import()
    from megatron_ext.evaluation.runner import evaluate

    evaluate(folder, suites, step=step, overrides=overrides, output=output)


def _split_checkpoint_path(path: Path, step: int | None) -> tuple[Path, int | None]:
    """Return the run folder and the step of a path that may be the folder of a checkpoint."""
    path_step = parse_step_name(path.name)
    if path_step is None or path.parent.name != CHECKPOINTS:
        return path, step
    if step not in (None, path_step):
        raise UserError("--step", f"{step} is not the step of {path}", "omit --step, or give the run folder")
    return path.parent.parent, path_step


def _split_overrides(overrides: Sequence[str], suites: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Split overrides into those of each suite, without its name, and those of the run."""
    suite_overrides: dict[str, list[str]] = {name: [] for name in suites}
    run_overrides = []
    for override in overrides:
        key = override.partition("=")[0]
        section, _, field = override.partition(".")
        if section in suite_overrides:
            suite_overrides[section].append(field)
        elif section in SUITES:
            raise UserError(
                key, f"belongs to a suite that is not in --suite {','.join(suites)}", "add the suite to --suite"
            )
        elif not OVERRIDABLE_FIELDS.fullmatch(key):
            hint = "override the layout (parallel.*), the device, the micro-batch, the data or a field of a suite"
            raise UserError(key, "cannot be changed for a trained model", hint)
        else:
            run_overrides.append(override)
    return suite_overrides, run_overrides
