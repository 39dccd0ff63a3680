"""`selectron launch`, `status`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import UserError
from megatron_ext.files import is_url
from megatron_ext.launch import slurm
from megatron_ext.launch.job import claim, jobs_of, local_environment, write_job
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.status import run_folders, status_table
from megatron_ext.launch.sweep import Sweep, run_table
from megatron_ext.reports import table


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Arguments of `selectron launch` beside the configuration."""
    add_where(parser)
    how = parser.add_argument_group("how it goes on")
    how.add_argument("--resume", action="store_true", help="continue a run that is there")
    how.add_argument("--dry-run", action="store_true", help="write the job's folder, show its script, submit nothing")


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Arguments of `selectron sweep`."""
    parser.add_argument(
        "sweep", type=Path, metavar="SWEEP", help="YAML file with config, axes and runs, see the README"
    )
    override = "of all runs, e.g. training.steps=200; or another YAML file, laid over their configuration"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=override)
    add_where(parser)
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="with --local: runs at a time (1)")
    parser.add_argument("--dry-run", action="store_true", help="check all runs and list them, start nothing")


def add_where(parser: argparse.ArgumentParser) -> None:
    """What a job is, for each run of a sweep as for a single one."""
    where = parser.add_argument_group("where it runs")
    where.add_argument("--nodes", type=int, metavar="N", help="nodes (default 1)")
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each node, a process for each")
    where.add_argument("--processes-per-node", type=int, metavar="N", help="processes of each node, without GPUs")
    where.add_argument("--partition", help="of the cluster (its default one)")
    where.add_argument("--time", help="limit: minutes, H:MM:SS or D-HH (the partition's)")
    where.add_argument("--local", type=int, metavar="N", help="without Slurm: N processes of this machine")
    where.add_argument("--job-name", help="as squeue shows it (run.name)")
    option = "another option of sbatch, e.g. --sbatch=--account=mine; may be given again"
    where.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=option)
    image = "image for enroot with pyxis, or a .sif file for Apptainer"
    where.add_argument("--container", metavar="IMAGE", help=image)
    mounts = "paths that the container sees beside this folder, separated by commas"
    where.add_argument("--container-mounts", metavar="PATHS", help=mounts)
    python = "interpreter of the processes (this one; in a container python3)"
    where.add_argument("--python", metavar="PATH", help=python)
    before = "seconds before the time is up at which it writes a checkpoint and starts anew (180)"
    where.add_argument("--save-before", type=int, default=180, metavar="SECONDS", help=before)
    where.add_argument("--requeues", type=int, default=20, metavar="N", help="most times that it starts anew (20)")


def world_size(args: argparse.Namespace) -> int:
    """Check the options, and count the processes of the run that is launched.

    Raises:
        UserError: an option is not what it must be.
    """
    if args.local is not None:
        for option in ("nodes", "gpus_per_node", "processes_per_node", "partition", "time", "container"):
            if getattr(args, option) is not None:
                problem = f"{args.local}, beside --{option.replace('_', '-')}, which is for Slurm"
                raise UserError("--local", problem, "leave one of them out")
        if args.local < 1:
            raise UserError("--local", f"{args.local} is less than 1", "give 1 or more")
        return int(args.local)
    resources = _resources(args, "run")
    resources.check()
    return resources.nodes * resources.tasks_per_node


def _resources(args: argparse.Namespace, run_name: str) -> Resources:
    return Resources(
        nodes=1 if args.nodes is None else args.nodes,
        gpus_per_node=args.gpus_per_node,
        processes_per_node=args.local or args.processes_per_node,
        partition=args.partition,
        time=args.time,
        job_name=args.job_name or run_name,
        save_before=args.save_before,
        requeues=args.requeues,
        container=args.container,
        mounts=args.container_mounts.split(",") if args.container_mounts else [],
        more=args.sbatch,
    )


def launch(args: argparse.Namespace, config: RunConfig, refuse_existing: Callable[[], None]) -> int:
    """Write the job of a run and submit it, or start it here.

    Args:
        args: see `add_launch`; checked by `world_size`.
        config: checked for as many processes.
        refuse_existing: raises where there is a run already.

    Returns:
        The exit code.

    Raises:
        UserError: something is missing, here or in the cluster.
    """
    folder = Path(config.run.dir) / config.run.name
    resources = _resources(args, config.run.name)
    # A container may have its own name for it.
    if not args.container and not is_url(config.data.path) and not Path(config.data.path).is_dir():
        raise UserError("data.path", f"there is no folder {config.data.path}", "prepare it with `selectron prepare`")
    if not args.resume:
        refuse_existing()
    if args.local is None and not args.dry_run:
        slurm.check_installed()
        resources.check_cluster(slurm.partitions())
        _refuse_alive(folder)
    if args.local is not None and not args.dry_run and claim(folder) is None:
        raise UserError("run.name", f"{folder} is trained by another process", "wait for it, or end it with Ctrl-C")
    job = write_job(config, folder, resources, _python(args))
    if args.dry_run:
        sys.stdout.write(job.script.read_text())
        print(f"written, and not submitted: {job.script}", file=sys.stderr)
        return 0
    if args.local is not None:
        print(f"events: {job.folder}/events.tsv\nfollow: selectron status {folder}", file=sys.stderr, flush=True)
        os.execvpe("bash", ["bash", str(job.script)], local_environment(args.local))
    job.keep_number(slurm.submit(job.script))
    print(
        f"job:    {job.number}\nlog:    {job.log}\nfollow: selectron logs {folder} --follow; selectron status {folder}"
    )
    return 0


def sweep(args: argparse.Namespace, configs: Mapping[str, RunConfig], overrides: Mapping[str, Sequence[str]]) -> int:
    """Launch all runs of a sweep that are not finished.

    Args:
        args: see `add_sweep`; checked by `world_size`.
        configs: whole and checked, by the runs' names.
        overrides: what makes each of them.

    Returns:
        The exit code.

    Raises:
        UserError: something is missing, here or in the cluster.
    """
    if args.parallel < 1:
        raise UserError("--parallel", f"{args.parallel} is less than 1", "give 1 or more")
    if args.dry_run:
        print("\n".join(table(("run", "steps", "tokens", "fields"), run_table(configs, overrides))))
        return 0
    folder = Path(next(iter(configs.values())).run.dir)
    resources = _resources(args, folder.name)
    if args.local is None:
        slurm.check_installed()
        resources.check_cluster(slurm.partitions())
    runs = Sweep(folder, configs, resources, _python(args))
    runs.note()
    if args.local is not None:
        return runs.run(args.local, args.parallel)
    runs.submit()
    print(f"follow: selectron status {folder}")
    return 0


def _python(args: argparse.Namespace) -> str:
    return str(args.python or ("python3" if args.container else sys.executable))


def _refuse_alive(folder: Path) -> None:
    for job in jobs_of(folder)[-1:]:
        state = None if job.number is None else slurm.job_state(job.number)
        if state is not None and state.is_alive:
            problem = f"{folder} has job {job.number} ({state.state.lower()})"
            raise UserError("run.name", problem, f"`selectron cancel {folder}` ends it; or choose another run.name")


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Arguments of `selectron status` and `selectron cancel`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of run folders")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Arguments of `selectron logs`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--follow", action="store_true", help="go on showing what is written")
    parser.add_argument("--lines", type=int, default=50, metavar="N", help="as many from the end (50)")


def status(args: argparse.Namespace) -> int:
    """Print how runs stand."""
    print("\n".join(status_table(list(run_folders(args.runs)))))
    return 0


def logs(args: argparse.Namespace) -> int:
    """Show the end of the newest job's log.

    Raises:
        UserError: there is none yet.
    """
    jobs = jobs_of(args.run)
    if not jobs:
        raise UserError(str(args.run), "is no run that was launched", "give run.dir/run.name of one")
    job = jobs[-1]
    if not job.log.exists():
        problem = (
            f"job {job.number} has printed nothing yet" if job.number else "its output went to where it was started"
        )
        raise UserError(str(args.run), problem, f"see `selectron status {args.run}`")
    follow = ["--follow"] if args.follow else []
    sys.stdout.flush()
    os.execvp("tail", ["tail", f"--lines={args.lines}", *follow, str(job.log)])


def cancel(args: argparse.Namespace) -> int:
    """End the jobs of runs that are under way; each leaves a checkpoint if Slurm lets it (KillWait).

    Raises:
        UserError: one was not submitted to Slurm, or Slurm refuses.
    """
    for folder in run_folders(args.runs):
        for job in jobs_of(folder)[-1:]:
            if job.number is None:
                raise UserError(str(folder), "its job is not Slurm's", "end it where it was started (Ctrl-C)")
            state = slurm.job_state(job.number)
            if state is not None and state.is_alive:
                slurm.cancel(job.number)
                print(f"{folder.name}: job {job.number} is cancelled")
    return 0
