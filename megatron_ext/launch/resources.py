"""Resources that a job requests from Slurm, and their checks against the cluster before submission."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.launch.sbatch_options import check_options
from megatron_ext.launch.slurm import UNLIMITED, Partition
from megatron_ext.utils.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Requested resources.

    Attributes:
        nodes: number of nodes.
        gpus_per_node: number of GPUs of each node, with one task per GPU; None for a job without GPUs.
        processes_per_node: number of tasks on each node of a job without GPUs.
        cpus_per_task: number of processors of each task; None for the cluster's default, usually one.
        partition: name of the partition; None for Slurm's default partition.
        time: time limit in Slurm's format (minutes, H:MM:SS, D-HH, ...); None for the partition's limit.
        job_name: name of the job in squeue.
        save_before: seconds before the time limit at which the run saves a checkpoint and the job starts again.
        requeues: maximum number of restarts.
        container: image for enroot with pyxis, or a .sif file for Apptainer; None to run without a container.
        mounts: paths visible in the container in addition to the working folder and the folder of the runs.
        extra_options: further sbatch options, e.g. `--account=x`.
        preflight: arguments of `selectron preflight` before training; empty to skip it.
    """

    nodes: int
    gpus_per_node: int | None = None
    processes_per_node: int | None = None
    cpus_per_task: int | None = None
    partition: str | None = None
    time: str | None = None
    job_name: str
    save_before: int = 180
    requeues: int = 20
    container: str | None = None
    mounts: list[str] = field(default_factory=list)
    extra_options: list[str] = field(default_factory=list)
    preflight: list[str] = field(default_factory=list)

    @property
    def tasks_per_node(self) -> int:
        """Number of processes of the run on each node."""
        return self.gpus_per_node or self.processes_per_node or 1

    def check(self) -> None:
        """Check the options that are independent of the cluster.

        Raises:
            UserError: an option is invalid.
        """
        for option, value in (
            ("--nodes", self.nodes),
            ("--gpus-per-node", self.gpus_per_node),
            ("--processes-per-node", self.processes_per_node),
            ("--cpus-per-task", self.cpus_per_task),
        ):
            if value is not None and value < 1:
                raise UserError(option, f"{value} is less than 1", "give 1 or more")
        if self.gpus_per_node and self.processes_per_node:
            problem = (
                f"{self.processes_per_node} cannot be combined with --gpus-per-node, which starts a process per GPU"
            )
            raise UserError("--processes-per-node", problem, "omit one of them")
        if not _NAME.fullmatch(self.job_name):
            hint = "use letters, digits, '.', '_' and '-'"
            raise UserError("--job-name", f"{self.job_name!r} is not a valid file name", hint)
        if self.time is not None and self.time_seconds() <= self.save_before:
            problem = f"{self.time} is not longer than --save-before, {self.save_before} s"
            raise UserError("--time", problem, "increase it, or reduce --save-before")
        check_options(self.extra_options)
        if self.container is not None and looks_like_path(self.container) and not Path(self.container).is_file():
            raise UserError(
                "--container",
                f"there is no file {self.container}",
                "give an image file or the name of an image in a registry",
            )

    def check_mounts(self) -> None:
        """Check that the paths to mount exist on this machine.

        Raises:
            UserError: a path does not exist.
        """
        for mount in self.mounts:
            path = mount.split(":")[0]
            if not path or not Path(path).exists():
                hint = "give existing paths, PATH or PATH:PATH_IN_CONTAINER, separated by commas"
                raise UserError("--container-mounts", f"there is no {path or 'path before a comma'}", hint)

    def container_mounts(self, runs: Path) -> list[str]:
        """Return the mounts of the container, `PATH` or `PATH:PATH_IN_CONTAINER`.

        Args:
            runs: folder of the run folders, which contains checkpoints, records and a sweep's code.
        """
        return list(dict.fromkeys([str(Path.cwd()), str(runs), *self.mounts]))

    def host_path(self, path: str, runs: Path) -> Path | None:
        """Translate a path in the container to this machine; None if the path is below no mount.

        Args:
            path: path in the container, absolute or relative to the working folder.
            runs: folder of the run folders.
        """
        absolute_path = Path(os.path.abspath(path))
        if self.container is None:
            return absolute_path
        pairs = [(mount.split(":") * 2)[:2] for mount in self.container_mounts(runs)]
        candidates = [(Path(source), Path(target)) for source, target in pairs if absolute_path.is_relative_to(target)]
        if not candidates:
            return None
        source, target = max(candidates, key=lambda pair: len(pair[1].parts))
        return source / absolute_path.relative_to(target)

    def time_seconds(self) -> float:
        """Return the time limit in seconds.

        Raises:
            UserError: the limit is not in Slurm's format.
        """
        assert self.time is not None
        try:
            return parse_time(self.time)
        except ValueError:
            hint = "give minutes, H:MM:SS or D-HH:MM:SS"
            raise UserError("--time", f"{self.time!r} is not in a time format of Slurm", hint) from None

    def check_cluster(self, partitions: Mapping[str, Partition]) -> None:
        """Check the request against the partitions of this cluster.

        Raises:
            UserError: the partition does not exist or is too small.
        """
        chosen = self._partition(partitions)
        prefix = f"partition {chosen.name} has"
        if chosen.nodes:  # 0 for powered-down cloud nodes, which only sbatch can check
            self._check_nodes(chosen, prefix)
        limit = chosen.time_limit
        if self.time is not None and limit != UNLIMITED and self.time_seconds() > parse_time(limit):
            raise UserError("--time", f"{self.time} is too long: {prefix} a limit of {limit}", f"give {limit} or less")

    def _check_nodes(self, chosen: Partition, prefix: str) -> None:
        if self.nodes > chosen.nodes:
            raise UserError(
                "--nodes", f"{self.nodes} is too many: {prefix} {chosen.nodes} nodes", f"give {chosen.nodes} or fewer"
            )
        if self.gpus_per_node and self.gpus_per_node > chosen.gpus_per_node:
            hint = (
                f"give {chosen.gpus_per_node} or fewer" if chosen.gpus_per_node else "give --processes-per-node instead"
            )
            problem = f"{self.gpus_per_node} is too many: {prefix} {chosen.gpus_per_node} GPUs per node"
            raise UserError("--gpus-per-node", problem, hint)
        if not self.gpus_per_node and self.tasks_per_node > chosen.tasks_per_node:
            problem = f"{self.tasks_per_node} is too many: {prefix} {chosen.tasks_per_node} CPUs per node"
            raise UserError("--processes-per-node", problem, f"give {chosen.tasks_per_node} or fewer")
        max_cpus = chosen.tasks_per_node // self.tasks_per_node
        if self.cpus_per_task and self.cpus_per_task > max_cpus:
            processes = f"for each of {self.tasks_per_node} processes" if self.tasks_per_node > 1 else "for one process"
            problem = f"{self.cpus_per_task} {processes} is too many: {prefix} {chosen.tasks_per_node} CPUs per node"
            raise UserError(
                "--cpus-per-task", problem, f"give {max_cpus} or fewer" if max_cpus else "give fewer processes"
            )

    def _partition(self, partitions: Mapping[str, Partition]) -> Partition:
        names = ", ".join(sorted(partitions))
        if self.partition is None:
            default = [partition for partition in partitions.values() if partition.is_default]
            if not default:
                raise UserError("--partition", "the cluster has no default partition", f"choose from {names}")
            return default[0]
        if self.partition not in partitions:
            raise UserError("--partition", f"there is no partition {self.partition}", f"choose from {names}")
        return partitions[self.partition]

    def sbatch_options(self) -> list[str]:
        """Return the sbatch options of the request."""
        requested = {
            "--partition": self.partition,
            "--time": self.time,
            "--gpus-per-node": self.gpus_per_node,
            "--cpus-per-task": self.cpus_per_task,
        }
        options = [f"{option}={value}" for option, value in requested.items() if value is not None]
        fixed = [f"--nodes={self.nodes}", f"--ntasks-per-node={self.tasks_per_node}"]
        return [*fixed, *options, f"--signal=B:USR1@{self.save_before}", *self.extra_options]


def parse_time(time: str) -> float:
    """Convert a time in Slurm's format to seconds: minutes, M:SS, H:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    Raises:
        ValueError: the format is invalid.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(time)
    parts = [int(part) for part in match.group("a", "b", "c") if part is not None]
    if match["days"] is not None:
        hours, minutes, remaining_seconds = (*parts, 0, 0)[:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + remaining_seconds
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def looks_like_path(image: str) -> bool:
    """Return True if a container image is a file rather than a name in a registry."""
    return image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))
