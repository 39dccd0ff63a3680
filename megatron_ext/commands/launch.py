"""Command `selectron launch`, and functions that it shares with `selectron sweep`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ext.commands import run_config
from megatron_ext.config.rules.nodes import check_nodes
from megatron_ext.config.schema import RunConfig
from megatron_ext.launch import slurm
from megatron_ext.launch.branches import is_checkpoint
from megatron_ext.launch.here import run_script
from megatron_ext.launch.job import (
    Job,
    acquire_local_lock,
    hold_submission_locks,
    list_jobs,
    newest_job,
    sbatch_options,
    write_job,
)
from megatron_ext.launch.ownership import own_state
from megatron_ext.launch.preflight import limits
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.sbatch_options import check_variables
from megatron_ext.run_folder import lock_file
from megatron_ext.run_folder.layout import CHECKPOINTS
from megatron_ext.run_folder.lock import FOLDER
from megatron_ext.run_folder.lock_file import lock_state
from megatron_ext.utils.atomic_files import is_url
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.resume_option import add_resume_option

_SLURM_OPTIONS = ("nodes", "gpus_per_node", "processes_per_node", "cpus_per_task", "partition", "time", "container")
"""Options that do not apply to a run on this machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, the resources and the options of a start."""
    run_config.add_config(parser)
    add_resources(parser)
    start = parser.add_argument_group("start")
    add_resume_option(start, "continue an existing run")
    start.add_argument(
        "--dry-run", action="store_true", help="write the job's folder and print its script without submitting it"
    )


def run(args: argparse.Namespace) -> int:
    """Check the configuration and launch its run, see `launch`.

    Returns:
        Exit code.

    Raises:
        UserError: an option or the configuration is invalid; see also `launch`.
    """
    config = run_config.load_checked(args.config, args.overrides, world_size(args))

    def check_can_start() -> None:
        from megatron_ext.training import starting

        starting.check_can_start(config, args.resume)

    return launch(args, config, check_can_start)


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a job, common to single runs and sweeps."""
    group = parser.add_argument_group("resources")
    group.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default 1)")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per node, with one process each")
    group.add_argument("--processes-per-node", type=int, metavar="N", help="processes per node, without GPUs")
    cpus = "CPUs and threads per process (default: the cluster's, usually 1)"
    group.add_argument("--cpus-per-task", type=int, metavar="N", help=cpus)
    group.add_argument("--partition", help="partition (default: that of the cluster)")
    group.add_argument("--time", help="time limit: minutes, H:MM:SS or D-HH (default: that of the partition)")
    group.add_argument("--local", type=int, metavar="N", help="train without Slurm, with N processes on this machine")
    group.add_argument("--job-name", help="name of the job in squeue (default: run.name)")
    sbatch = "further sbatch option that the job does not set itself, e.g. --sbatch=--account=mine; may be repeated"
    group.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=sbatch)
    container = "container image for enroot with pyxis, or a .sif file for Apptainer"
    group.add_argument("--container", metavar="IMAGE", help=container)
    mounts = "paths to mount in addition to this folder and run.dir, separated by commas"
    group.add_argument("--container-mounts", metavar="PATHS", help=mounts)
    python = "Python interpreter of the processes (default: this one; in a container python3)"
    group.add_argument("--python", metavar="PATH", help=python)
    save_before = "seconds before the time limit at which the job saves a checkpoint and is requeued (default 180)"
    group.add_argument("--save-before", type=int, default=180, metavar="SECONDS", help=save_before)
    no_preflight = "skip the node check of `selectron preflight`"
    group.add_argument("--no-preflight", action="store_true", help=no_preflight)
    limits.add_limits(parser)
    group.add_argument("--requeues", type=int, default=20, metavar="N", help="maximum number of requeues (default 20)")


def world_size(args: argparse.Namespace) -> int:
    """Check the options and return the number of processes of the launched run.

    Raises:
        UserError: an option is invalid.
    """
    if args.local is not None:
        for option in _SLURM_OPTIONS:
            if getattr(args, option) is not None:
                problem = f"{args.local} cannot be combined with --{option.replace('_', '-')}, which applies to Slurm"
                raise UserError("--local", problem, "omit one of them")
        if args.local < 1:
            raise UserError("--local", f"{args.local} is less than 1", "give 1 or more")
        return int(args.local)
    resources = requested_resources(args, "run")
    resources.check()
    options = {"--partition": args.partition, "--time": args.time, "--cpus-per-task": args.cpus_per_task}
    check_variables(os.environ, [option for option, value in options.items() if value is not None])
    return resources.nodes * resources.tasks_per_node


def requested_resources(args: argparse.Namespace, run_name: str) -> Resources:
    """Return the resources that the options request; `run_name` is the default of the job's name."""
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
        extra_options=args.sbatch,
        preflight=[] if args.no_preflight else limits.limit_arguments(args),
    )


def launch(args: argparse.Namespace, config: RunConfig, check_can_start: Callable[[], None]) -> int:
    """Write the job of a run, and submit it or start it on this machine.

    Args:
        args: see `add_arguments`; checked by `world_size`.
        config: configuration, checked for that number of processes.
        check_can_start: raises a UserError if the run folder contains a run that is not to be resumed, or if it
            contains none although one is to be resumed.

    Returns:
        Exit code.

    Raises:
        UserError: something is missing on this machine or in the cluster.
    """
    folder = Path(config.run.dir) / config.run.name
    resources = requested_resources(args, config.run.name)
    check_nodes(config, resources.nodes * resources.tasks_per_node, resources.tasks_per_node)
    check_paths({"": config}, resources, python(args))
    check_can_start()
    if args.local is None:
        check_cluster(args, resources, sbatch_options(resources, folder.absolute(), "job-%j.log"))
    if args.dry_run:
        job = write_job(config, folder, resources, python(args))
        sys.stdout.write(job.script.read_text())
        print(f"written but not submitted: {job.script}", file=sys.stderr)
        return 0
    if args.local is not None:
        check_not_trained(folder)
        lock = acquire_local_lock(folder)
        if lock is None:
            raise UserError("run.name", f"another process trains {folder}", "wait for it, or stop it with Ctrl-C")
        job = write_job(config, folder, resources, python(args))
        print(f"events: {job.folder}/events.tsv\n{_format_follow_lines(job)}", file=sys.stderr, flush=True)
        return run_script(job, args.local, lock)
    with hold_submission_locks(folder):
        if not args.resume:
            check_can_start()
        check_no_live_job(folder)
        check_not_trained(folder)
        job = write_job(config, folder, resources, python(args))
        job.write_number(slurm.submit(job.script))
    print(f"job:    {job.number}\n{_format_follow_lines(job)}")
    return 0


def _format_follow_lines(job: Job) -> str:
    return f"log:    {job.log}\nfollow: selectron logs {job.run} --follow; selectron status {job.run}"


def check_paths(
    configs: Mapping[str, RunConfig],
    resources: Resources,
    python: str,
    waiting: Collection[str] = (),
    sweep: Path | None = None,
) -> None:
    """Check that the paths of runs exist. Print a warning for container paths that this machine cannot see.

    Args:
        configs: configurations of the runs that will start, by name within a sweep; a single run has the name "".
        resources: resources of each run.
        python: Python interpreter of the ranks.
        waiting: runs that branch from a checkpoint that another run has yet to write.
        sweep: file of the sweep; None: a single run.

    Raises:
        UserError: a folder, checkpoint, program or mount does not exist.
    """
    resources.check_mounts()
    if resources.container is None and shutil.which(python) is None:
        raise UserError("--python", f"there is no program {python}", "give an interpreter with Selectron installed")
    unchecked = []
    for name, config in configs.items():
        for field, path, exists, kind, hint in _required_paths(config, is_waiting=name in waiting):
            local_path = resources.host_path(path, Path(config.run.dir).absolute())
            if local_path is None:
                unchecked.append(f"{field}: {path} is not under a mount of the container and was not checked")
            elif not exists(local_path):
                shown = path if local_path == Path(os.path.abspath(path)) else f"{path} ({local_path} on this machine)"
                where = field if sweep is None else f"{sweep}: run {name}: {field}"
                raise UserError(where, f"there is no {kind} {shown}", hint)
    for line in dict.fromkeys(unchecked):
        print(f"selectron: warning: {line}", file=sys.stderr)


def _required_paths(
    config: RunConfig, *, is_waiting: bool
) -> Iterator[tuple[str, str, Callable[[Path], bool], str, str]]:
    """Yield the folders that a run needs at its start, as field, path, existence test, kind and hint."""
    if not is_url(config.data.path):
        yield "data.path", config.data.path, Path.is_dir, "folder", "prepare it with `selectron prepare`"
    checkpoints = Path(config.run.dir) / config.run.name / CHECKPOINTS  # if they exist, the run resumes from there
    if config.run.branch_from is not None and not is_waiting and not checkpoints.exists():
        hint = "give a path like runs/trunk/checkpoints/step_400"
        yield "run.branch_from", config.run.branch_from, is_checkpoint, "checkpoint", hint


def check_cluster(args: argparse.Namespace, resources: Resources, options: Sequence[str]) -> None:
    """Check the request against the cluster. Without a cluster, a dry run only prints a warning.

    Raises:
        UserError: the cluster lacks what is requested, or there is no cluster.
    """
    try:
        slurm.check_installed()
        partitions = slurm.partitions()
    except UserError as error:
        if not args.dry_run:
            raise
        print(
            f"selectron: warning: the request was not checked by a cluster: {error.where}: {error.problem}",
            file=sys.stderr,
        )
        return
    resources.check_cluster(partitions)
    slurm.check_options(options)


def python(args: argparse.Namespace) -> str:
    """Return the Python interpreter of the job's processes."""
    return str(args.python or ("python3" if args.container else sys.executable))


def check_no_live_job(folder: Path) -> None:
    """Check that a run has no waiting or running Slurm job.

    Raises:
        UserError: its newest job waits or runs.
    """
    numbers = slurm.numbers_by_script()
    for job in list_jobs(folder)[-1:]:  # a call that was killed may have submitted it without writing its number
        if job.number is None and str(job.script) in numbers:
            job.write_number(numbers[str(job.script)])
    newest = newest_job(folder)
    state = own_state(newest)
    if newest is not None and state is not None and state.is_alive:
        problem = f"{folder} has job {newest.number} ({state.state.lower()})"
        raise UserError("run.name", problem, f"cancel it with `selectron cancel {folder}`, or choose another run.name")


def check_not_trained(folder: Path) -> None:
    """Check that no process trains a run, however it was started.

    Raises:
        UserError: a process trains it.
    """
    state = lock_state(folder / FOLDER)
    if state is None or not state.is_held:
        return
    job = state.holder.process.job if state.holder else None
    if job is not None and shutil.which("squeue") is not None:
        job_state = slurm.job_state(job)
        if job_state is None or not job_state.is_alive:  # it was killed before it released the lock
            return
    age = f"; its last sign of life is {state.unchanged_seconds:.0f} s old"
    hint = lock_file.release_hint(state.holder)
    holder = state.holder or "an unidentified process"
    raise UserError("run.name", f"{folder} is trained by {holder}{age}", hint)
