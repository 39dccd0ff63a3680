"""Command `selectron sweep`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ext.commands import run_config
from megatron_ext.commands.launch import (
    add_resources,
    check_cluster,
    check_no_live_job,
    check_not_trained,
    check_paths,
    python,
    requested_resources,
    world_size,
)
from megatron_ext.config.rules.nodes import check_nodes
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.sweep_file import read_sweep, sweep_errors
from megatron_ext.launch.array import array_option
from megatron_ext.launch.changed_runs import changed_runs_error
from megatron_ext.launch.job import is_locally_locked, list_jobs, sbatch_options
from megatron_ext.launch.sweep import Sweep
from megatron_ext.run_folder.launch_events import EVENTS
from megatron_ext.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sweep, the resources and the options of a start."""
    parser.add_argument(
        "sweep", type=Path, metavar="SWEEP", help="YAML file with config, axes and runs; see the README"
    )
    override = "override for all runs, e.g. training.steps=200, or a YAML file with overrides"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=override)
    add_resources(parser)
    parallel = "maximum number of concurrent runs (default: 1 with --local, else no limit)"
    parser.add_argument("--parallel", type=int, metavar="N", help=parallel)
    restart_help = "restart a run whose configuration or data has changed; its old folder is kept; may be repeated"
    parser.add_argument("--restart", action="append", default=[], metavar="RUN", help=restart_help)
    parser.add_argument("--dry-run", action="store_true", help="check and list all runs without starting them")


def run(args: argparse.Namespace) -> int:
    """Check the configurations of all runs and launch those that are unfinished, see `sweep`.

    Returns:
        Exit code.

    Raises:
        UserError: an option or a configuration is invalid; see also `sweep`.
    """
    from megatron_ext.planning.sweep import run_table, sweep_runs

    processes = world_size(args)
    runs = sweep_runs(
        args.sweep,
        args.overrides,
        run_config.load,
        lambda config: run_config.check(config, processes),
        listed=args.dry_run,
    )
    return sweep(args, {name: run.config for name, run in runs.items()}, run_table(runs))


def sweep(args: argparse.Namespace, configs: Mapping[str, RunConfig], listing: Sequence[str]) -> int:
    """Launch all unfinished runs of a sweep.

    Args:
        args: see `add_arguments`; checked by `world_size`.
        configs: whole, checked configurations by run name.
        listing: lines that describe the runs.

    Returns:
        Exit code.

    Raises:
        UserError: something is missing on this machine or in the cluster.
    """
    if args.parallel is not None and args.parallel < 1:
        raise UserError("--parallel", f"{args.parallel} is less than 1", "give 1 or more")
    folder = Path(next(iter(configs.values())).run.dir)
    resources = requested_resources(args, folder.name)
    with sweep_errors(args.sweep):
        for config in configs.values():
            check_nodes(config, resources.nodes * resources.tasks_per_node, resources.tasks_per_node)
        runs = Sweep(folder, configs, resources, python(args))
    runs.check_restarts(args.restart)
    _check_unchanged(args, runs)
    try:
        to_start = runs.unfinished | {name: configs[name] for name in args.restart}
        check_paths(to_start, resources, python(args), runs.waiting, sweep=args.sweep)
    except UserError as error:
        if not args.dry_run:  # a dry run is allowed on a machine without the data
            raise
        print(f"selectron: warning: {error}", file=sys.stderr)
    if args.local is None:
        resources.check()  # again, with the job's name
        options = sbatch_options(resources, folder.absolute(), "array.log")
        check_cluster(args, resources, [*options, array_option(max(runs.largest_array(), 1))])
    if args.dry_run:
        print("\n".join(listing))
        return 0
    runs.restart(args.restart, _check_not_under_way)
    runs.write_run_list(read_sweep(args.sweep).chosen)
    if not runs.unfinished:
        print(f"all {len(configs)} runs are finished; compare them with: selectron report {folder} --output DIR")
        return 0
    if args.local is not None:
        return runs.run(args.local, args.parallel or 1)
    runs.submit(args.parallel)
    print(f"follow: selectron status {folder}")
    return 0


def _check_unchanged(args: argparse.Namespace, runs: Sweep) -> None:
    """Reject runs that were started with a different configuration or data; a dry run prints a warning.

    Raises:
        UserError: there are changed runs that `--restart` does not name.
    """
    unknown = [name for name in runs.runs_without_digests if name not in args.restart]
    if unknown:
        names = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        print(f"selectron: warning: it is unknown whether the data of {names} has changed", file=sys.stderr)
    changed = [run for run in runs.changed if run.name not in args.restart]
    if not changed:
        return
    error = changed_runs_error(args.sweep, changed)
    if not args.dry_run:
        raise error
    print(f"selectron: warning: {error}", file=sys.stderr)


def _check_not_under_way(folder: Path) -> None:
    """Check that a run has no waiting or running Slurm job and that no process trains it.

    Raises:
        UserError: a job or a process of the run is alive.
    """
    check_not_trained(folder)
    if is_locally_locked(folder):
        raise UserError("--restart", f"another process trains {folder}", "wait for it, or stop it with Ctrl-C")
    newest = list_jobs(folder)[-1:]
    # A job without number and events may have been submitted by a call that was killed before it wrote the number.
    if any(job.number is not None or not (job.folder / EVENTS).exists() for job in newest):
        check_no_live_job(folder)
