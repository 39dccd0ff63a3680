"""Checks of a node by one process: GPUs, memory, disk space, versions of the code."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from megatron_ext.utils import git_info

PACKAGES = ("megatron_ext", "kernels", "data_prep")
DISTRIBUTIONS = ("torch", "megatron-core", "transformer-engine", "deepspeed", "triton", "flash-linear-attention")
_SUFFIXES = {".py", ".sbatch", ".txt", ".html", ".j2"}
_MATRIX_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Result of checking a GPU.

    Attributes:
        index: index of the GPU on its node.
        name: name of the device.
        free: free memory in bytes.
        total: total memory in bytes.
        error: reason why computation on the GPU fails; empty if it works.
    """

    index: int
    name: str = ""
    free: int = 0
    total: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Free space in a folder.

    Attributes:
        path: path of the folder.
        free: free bytes; None if the folder does not exist.
    """

    path: str
    free: int | None


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Results of a process.

    Attributes:
        rank: global rank of the process.
        local_rank: rank of the process on its node.
        node: Slurm's node name, or else the host name.
        processes: number of processes on this node.
        gpus_asked: number of GPUs that Slurm allocated to the job on this node; 0 without Slurm.
        gpus_seen: number of GPUs visible to this process.
        gpus: GPUs that this process checked.
        memory: available memory of the node in bytes.
        spaces: free space by use: `run`, `temporary`, `shared memory`.
        versions: versions of the code and its dependencies, by name.
    """

    rank: int
    local_rank: int
    node: str
    processes: int
    gpus_asked: int = 0
    gpus_seen: int = 0
    gpus: list[Gpu] = field(default_factory=list)
    memory: int = 0
    spaces: dict[str, Space] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def check_node(folder: Path, environment: Mapping[str, str] = os.environ) -> NodeReport:
    """Check the node of this process.

    Args:
        folder: folder of the run's job.
        environment: environment variables RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, and those of Slurm.
    """
    import torch

    processes, local_rank = int(environment["LOCAL_WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Not `tempfile.gettempdir()`, which chooses another folder if the disk is full. C libraries do not.
    folders = {"run": folder, "temporary": Path(environment.get("TMPDIR", "/tmp")), "shared memory": Path("/dev/shm")}
    return NodeReport(
        rank=int(environment["RANK"]),
        local_rank=local_rank,
        node=node_name(environment),
        processes=processes,
        gpus_asked=int(environment.get("SLURM_GPUS_ON_NODE") or 0),
        gpus_seen=num_gpus,
        gpus=[_check_gpu(index) for index in range(local_rank, num_gpus, processes)],
        memory=psutil.virtual_memory().available,
        spaces={use: Space(path=str(path), free=_free_bytes(path)) for use, path in folders.items()},
        versions=_versions(),
    )


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this node, or else the host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _check_gpu(index: int) -> Gpu:
    """Compare a matrix product on a GPU with the CPU's. The factors are small integers, so all fp32 sums are exact."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        a, b = (torch.randint(-4, 5, (_MATRIX_SIZE, _MATRIX_SIZE)).float() for _ in range(2))
        product = (a.to(f"cuda:{index}") @ b.to(f"cuda:{index}")).cpu()
    except RuntimeError as error:  # base class of torch's errors
        return Gpu(index=index, error=str(error).splitlines()[0])
    num_wrong = int((product != a @ b).sum())
    problem = f"{num_wrong} of {_MATRIX_SIZE**2} numbers of a matrix product are wrong" if num_wrong else ""
    return Gpu(index=index, name=name, free=free, total=total, error=problem)


def _versions() -> dict[str, str]:
    found = {"code": code_digest(git_info.ROOT), "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_digest(root: Path) -> str:
    """Return twelve hexadecimal digits of a digest of the packages' sources below `root`."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
