"""`selectron launch`, `status`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import UserError
from megatron_ext.files import is_url
from megatron_ext.launch import slurm
from megatron_ext.launch.job import jobs_of, write_job
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.status import run_folders, status_table


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Arguments of `selectron launch` beside the configuration."""
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
    how = parser.add_argument_group("how it goes on")
    how.add_argument("--resume", action="store_true", help="continue a run that is there")
    before = "seconds before the time is up at which it writes a checkpoint and starts anew (180)"
    how.add_argument("--save-before", type=int, default=180, metavar="SECONDS", help=before)
    how.add_argument("--requeues", type=int, default=20, metavar="N", help="most times that the job starts anew (20)")
    how.add_argument("--dry-run", action="store_true", help="write the job's folder, show its script, submit nothing")


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
    job = write_job(config, folder, resources, args.python or ("python3" if args.container else sys.executable))
    if args.dry_run:
        sys.stdout.write(job.script.read_text())
        print(f"written, and not submitted: {job.script}", file=sys.stderr)
        return 0
    if args.local is not None:
        print(f"events: {job.folder}/events.tsv\nfollow: selectron status {folder}", file=sys.stderr, flush=True)
        environment = {**os.environ, "SELECTRON_PROCESSES": str(args.local)}
        environment = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
        os.execvpe("bash", ["bash", str(job.script)], environment)
    job.keep_number(slurm.submit(job.script))
    print(
        f"job:    {job.number}\nlog:    {job.log}\nfollow: selectron logs {folder} --follow; selectron status {folder}"
    )
    return 0


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
    (folder,) = list(run_folders([args.run]))[:1]
    job = jobs_of(folder)[-1]
    if not job.log.exists():
        problem = (
            f"job {job.number} has printed nothing yet" if job.number else "its output went to where it was started"
        )
        raise UserError(str(folder), problem, f"see `selectron status {folder}`")
    follow = ["--follow"] if args.follow else []
    sys.stdout.flush()
    os.execvp("tail", ["tail", f"--lines={args.lines}", *follow, str(job.log)])


def cancel(args: argparse.Namespace) -> int:
    """End the newest jobs of runs; each leaves a checkpoint if Slurm lets it (KillWait).

    Raises:
        UserError: one was not submitted to Slurm, or Slurm refuses.
    """
    for folder in run_folders(args.runs):
        job = jobs_of(folder)[-1]
        if job.number is None:
            raise UserError(str(folder), "its job is not Slurm's", "end it where it was started (Ctrl-C)")
        slurm.cancel(job.number)
        print(f"{folder.name}: job {job.number} is cancelled")
    return 0
