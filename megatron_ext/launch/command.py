"""`selectron launch` and `selectron sweep`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ext.config.rules.nodes import check_nodes
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import UserError
from megatron_ext.events import EVENTS
from megatron_ext.files import is_url
from megatron_ext.launch import preflight_limits, slurm
from megatron_ext.launch.array import tasks
from megatron_ext.launch.branches import is_checkpoint
from megatron_ext.launch.changed_runs import refusal
from megatron_ext.launch.here import run_here
from megatron_ext.launch.job import (
    Job,
    claim,
    is_claimed,
    jobs_of,
    newest_job,
    sbatch_options,
    submitting,
    write_job,
)
from megatron_ext.launch.ownership import own_state
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.resuming import add_resume
from megatron_ext.launch.sbatch_options import check_variables
from megatron_ext.launch.sweep import Sweep
from megatron_ext.launch.sweep_file import of_sweep
from megatron_ext.run_folder import lock_file
from megatron_ext.run_folder.lock import FOLDER
from megatron_ext.run_folder.lock_file import lock_state

_OF_SLURM = ("nodes", "gpus_per_node", "processes_per_node", "cpus_per_task", "partition", "time", "container")
"""Options that mean nothing to a run on this machine."""


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Arguments of `selectron launch` beside the configuration."""
    add_where(parser)
    how = parser.add_argument_group("how it goes on")
    add_resume(how, "continue a run that is there")
    how.add_argument("--dry-run", action="store_true", help="write the job's folder, show its script, submit nothing")


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Arguments of `selectron sweep`."""
    parser.add_argument(
        "sweep", type=Path, metavar="SWEEP", help="YAML file with config, axes and runs, see the README"
    )
    override = "of all runs, e.g. training.steps=200; or another YAML file, laid over their configuration"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=override)
    add_where(parser)
    at_once = "most runs at a time (with --local 1, else as many as Slurm gives)"
    parser.add_argument("--parallel", type=int, metavar="N", help=at_once)
    anew = "begin a run anew that was begun otherwise; what it was is kept; may be given again"
    parser.add_argument("--restart", action="append", default=[], metavar="RUN", help=anew)
    parser.add_argument("--dry-run", action="store_true", help="check all runs and list them, start nothing")


def add_where(parser: argparse.ArgumentParser) -> None:
    """What a job is, for each run of a sweep as for a single one."""
    where = parser.add_argument_group("where it runs")
    where.add_argument("--nodes", type=int, metavar="N", help="nodes (default 1)")
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each node, a process for each")
    where.add_argument("--processes-per-node", type=int, metavar="N", help="processes of each node, without GPUs")
    cpus = "processors of each process, whose threads they run (the cluster's rule, most often 1)"
    where.add_argument("--cpus-per-task", type=int, metavar="N", help=cpus)
    where.add_argument("--partition", help="of the cluster (its default one)")
    where.add_argument("--time", help="limit: minutes, H:MM:SS or D-HH (the partition's)")
    where.add_argument("--local", type=int, metavar="N", help="without Slurm: N processes of this machine")
    where.add_argument("--job-name", help="as squeue shows it (run.name)")
    option = "another option of sbatch that is not the job's own, e.g. --sbatch=--account=mine; may be given again"
    where.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=option)
    image = "image for enroot with pyxis, or a .sif file for Apptainer"
    where.add_argument("--container", metavar="IMAGE", help=image)
    mounts = "paths that the container sees beside this folder, separated by commas"
    where.add_argument("--container-mounts", metavar="PATHS", help=mounts)
    python = "interpreter of the processes (this one; in a container python3)"
    where.add_argument("--python", metavar="PATH", help=python)
    before = "seconds before the time is up at which it writes a checkpoint and starts anew (180)"
    where.add_argument("--save-before", type=int, default=180, metavar="SECONDS", help=before)
    look = "train without a look at the nodes, see `selectron preflight`"
    where.add_argument("--no-preflight", action="store_true", help=look)
    preflight_limits.add_limits(parser)
    where.add_argument("--requeues", type=int, default=20, metavar="N", help="most times that it starts anew (20)")


def world_size(args: argparse.Namespace) -> int:
    """Check the options, and count the processes of the run that is launched.

    Raises:
        UserError: an option is not what it must be.
    """
    if args.local is not None:
        for option in _OF_SLURM:
            if getattr(args, option) is not None:
                problem = f"{args.local}, beside --{option.replace('_', '-')}, which is for Slurm"
                raise UserError("--local", problem, "leave one of them out")
        if args.local < 1:
            raise UserError("--local", f"{args.local} is less than 1", "give 1 or more")
        return int(args.local)
    resources = _resources(args, "run")
    resources.check()
    options = {"--partition": args.partition, "--time": args.time, "--cpus-per-task": args.cpus_per_task}
    check_variables(os.environ, [option for option, value in options.items() if value is not None])
    return resources.nodes * resources.tasks_per_node


def _resources(args: argparse.Namespace, run_name: str) -> Resources:
    return Resources(
        nodes=1 if args.nodes is None else args.nodes,
        gpus_per_node=args.gpus_per_node,
        processes_per_node=args.local or args.processes_per_node,
        cpus_per_task=args.cpus_per_task,
        partition=args.partition,
        time=args.time,
        job_name=args.job_name or run_name,
        save_before=args.save_before,
        requeues=args.requeues,
        container=args.container,
        mounts=args.container_mounts.split(",") if args.container_mounts else [],
        more=args.sbatch,
        preflight=[] if args.no_preflight else preflight_limits.words(args),
    )


def launch(args: argparse.Namespace, config: RunConfig, check_can_start: Callable[[], None]) -> int:
    """Write the job of a run and submit it, or start it here.

    Args:
        args: see `add_launch`; checked by `world_size`.
        config: checked for as many processes.
        check_can_start: raises a UserError if the run's folder holds a run that is not to be resumed, or if it holds
            none and one is to be resumed.

    Returns:
        The exit code.

    Raises:
        UserError: something is missing, here or in the cluster.
    """
    folder = Path(config.run.dir) / config.run.name
    resources = _resources(args, config.run.name)
    check_nodes(config, resources.nodes * resources.tasks_per_node, resources.tasks_per_node)
    check_paths({"": config}, resources, _python(args))
    check_can_start()
    if args.local is None:
        _check_cluster(args, resources, sbatch_options(resources, folder.absolute(), "job-%j.log"))
    if args.dry_run:
        job = write_job(config, folder, resources, _python(args))
        sys.stdout.write(job.script.read_text())
        print(f"written, and not submitted: {job.script}", file=sys.stderr)
        return 0
    if args.local is not None:
        refuse_held(folder)
        lock = claim(folder)
        if lock is None:
            raise UserError("run.name", f"{folder} is trained by another process", "wait for it, or end it with Ctrl-C")
        job = write_job(config, folder, resources, _python(args))
        print(f"events: {job.folder}/events.tsv\n{_how_to_follow(job)}", file=sys.stderr, flush=True)
        return run_here(job, args.local, lock)
    with submitting(folder):
        if not args.resume:
            check_can_start()
        _refuse_alive(folder)
        refuse_held(folder)
        job = write_job(config, folder, resources, _python(args))
        job.keep_number(slurm.submit(job.script))
    print(f"job:    {job.number}\n{_how_to_follow(job)}")
    return 0


def _how_to_follow(job: Job) -> str:
    return f"log:    {job.log}\nfollow: selectron logs {job.run} --follow; selectron status {job.run}"


def sweep(args: argparse.Namespace, configs: Mapping[str, RunConfig], listing: Sequence[str]) -> int:
    """Launch all runs of a sweep that are not finished.

    Args:
        args: see `add_sweep`; checked by `world_size`.
        configs: whole and checked, by the runs' names.
        listing: lines that say what they are.

    Returns:
        The exit code.

    Raises:
        UserError: something is missing, here or in the cluster.
    """
    if args.parallel is not None and args.parallel < 1:
        raise UserError("--parallel", f"{args.parallel} is less than 1", "give 1 or more")
    folder = Path(next(iter(configs.values())).run.dir)
    resources = _resources(args, folder.name)
    with of_sweep(args.sweep):
        for config in configs.values():
            check_nodes(config, resources.nodes * resources.tasks_per_node, resources.tasks_per_node)
        runs = Sweep(folder, configs, resources, _python(args))
    runs.check_restarts(args.restart)
    _check_unchanged(args, runs)
    try:
        begun = runs.unfinished | {name: configs[name] for name in args.restart}
        check_paths(begun, resources, _python(args), runs.waiting, sweep=args.sweep)
    except UserError as error:
        if not args.dry_run:  # runs may be planned, and listed, where their data is not
            raise
        print(f"selectron: warning: {error}", file=sys.stderr)
    if args.local is None:
        resources.check()  # again, as it has a name now
        options = sbatch_options(resources, folder.absolute(), "array.log")
        _check_cluster(args, resources, [*options, tasks(max(runs.largest_array(), 1))])
    if args.dry_run:
        print("\n".join(listing))
        return 0
    runs.restart(args.restart, _refuse_under_way)
    runs.note()
    if not runs.unfinished:
        print(f"all {len(configs)} runs are finished: selectron report {folder} --output DIR compares them")
        return 0
    if args.local is not None:
        return runs.run(args.local, args.parallel or 1)
    runs.submit(args.parallel)
    print(f"follow: selectron status {folder}")
    return 0


def _check_unchanged(args: argparse.Namespace, runs: Sweep) -> None:
    """Refuse runs that were begun otherwise than the sweep says now; a dry run warns of them.

    Raises:
        UserError: there are some, and nobody said that they are to begin anew.
    """
    unknown = [name for name in runs.without_digests if name not in args.restart]
    if unknown:
        names = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        print(f"selectron: warning: whether {names} had the same data is not known", file=sys.stderr)
    changed = [one for one in runs.changed if one.name not in args.restart]
    if not changed:
        return
    error = refusal(args.sweep, changed)
    if not args.dry_run:
        raise error
    print(f"selectron: warning: {error}", file=sys.stderr)


def _refuse_under_way(folder: Path) -> None:
    """Refuse a run that has a job of Slurm's which waits or runs, or that a process trains.

    Raises:
        UserError: it does.
    """
    refuse_held(folder)
    if is_claimed(folder):
        raise UserError("--restart", f"{folder} is trained by another process", "wait for it, or end it with Ctrl-C")
    newest = jobs_of(folder)[-1:]
    # One without number and events may have been submitted by a call that was stopped before it could note it.
    if any(job.number is not None or not (job.folder / EVENTS).exists() for job in newest):
        _refuse_alive(folder)


def check_paths(
    configs: Mapping[str, RunConfig],
    resources: Resources,
    python: str,
    waiting: Collection[str] = (),
    sweep: Path | None = None,
) -> None:
    """Refuse paths that are not there. Of those that a container has from elsewhere it is said that nobody looked.

    Args:
        configs: of the runs that are to begin, by their names in a sweep; a single run's by "".
        resources: of each.
        python: interpreter of the ranks.
        waiting: runs that begin from a checkpoint which need not be there yet.
        sweep: file that the runs are of; None: a single run's.

    Raises:
        UserError: there is no such folder, checkpoint, program or mount.
    """
    resources.check_mounts()
    if resources.container is None and shutil.which(python) is None:
        raise UserError("--python", f"there is no program {python}", "give an interpreter that has Selectron")
    unseen = []
    for name, config in configs.items():
        for field, path, is_there, kind, mend in _begins_from(config, is_waiting=name in waiting):
            here = resources.here(path, Path(config.run.dir).absolute())
            if here is None:
                unseen.append(f"{field}: {path} is below no mount of the container, so nobody looked for it")
            elif not is_there(here):
                found = path if here == Path(os.path.abspath(path)) else f"{path}, which is {here} on this machine"
                where = field if sweep is None else f"{sweep}: run {name}: {field}"
                raise UserError(where, f"there is no {kind} {found}", mend)
    for line in dict.fromkeys(unseen):
        print(f"selectron: warning: {line}", file=sys.stderr)


def _begins_from(config: RunConfig, *, is_waiting: bool) -> Iterator[tuple[str, str, Callable[[Path], bool], str, str]]:
    """Folders that a run needs when it begins: the field, the path, whether it is one, of what kind, and the mend."""
    if not is_url(config.data.path):
        yield "data.path", config.data.path, Path.is_dir, "folder", "prepare it with `selectron prepare`"
    own = Path(config.run.dir) / config.run.name / "checkpoints"  # of which it goes on from the newest, if it has begun
    if config.run.branch_from is not None and not is_waiting and not own.exists():
        mend = "give one like runs/trunk/checkpoints/step_400"
        yield "run.branch_from", config.run.branch_from, is_checkpoint, "checkpoint", mend


def _check_cluster(args: argparse.Namespace, resources: Resources, options: Sequence[str]) -> None:
    """Refuse what the cluster has not; a dry run where there is none to ask says so, and goes on.

    Raises:
        UserError: it has not what is asked for, or there is none.
    """
    try:
        slurm.check_installed()
        partitions = slurm.partitions()
    except UserError as error:
        if not args.dry_run:
            raise
        print(f"selectron: warning: no cluster was asked: {error.where}: {error.problem}", file=sys.stderr)
        return
    resources.check_cluster(partitions)
    slurm.check_options(options)


def _python(args: argparse.Namespace) -> str:
    return str(args.python or ("python3" if args.container else sys.executable))


def _refuse_alive(folder: Path) -> None:
    numbers = slurm.numbers_by_script()
    for job in jobs_of(folder)[-1:]:  # which a call may have submitted that was stopped before it could note its number
        if job.number is None and str(job.script) in numbers:
            job.keep_number(numbers[str(job.script)])
    newest = newest_job(folder)
    state = own_state(newest)
    if newest is not None and state is not None and state.is_alive:
        problem = f"{folder} has job {newest.number} ({state.state.lower()})"
        raise UserError("run.name", problem, f"`selectron cancel {folder}` ends it; or choose another run.name")


def refuse_held(folder: Path) -> None:
    """Refuse a run that a process trains, whoever began it.

    Raises:
        UserError: one does.
    """
    state = lock_state(folder / FOLDER)
    if state is None or not state.is_held:
        return
    job = state.holder.process.job if state.holder else None
    if job is not None and shutil.which("squeue") is not None:
        found = slurm.job_state(job)
        if found is None or not found.is_alive:  # it had no time to release the lock
            return
    signs = f"; its last sign is {state.quiet_seconds:.0f} s old"
    hint = lock_file.ending(state.holder)
    holder = state.holder or "a process that does not say who it is"
    raise UserError("run.name", f"{folder} is trained by {holder}{signs}", hint)
