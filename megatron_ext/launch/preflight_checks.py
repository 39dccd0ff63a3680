"""What one process finds of its node: GPUs, memory, space, versions of the code."""

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

from megatron_ext import source

PACKAGES = ("megatron_ext", "kernels", "data_prep")
DISTRIBUTIONS = ("torch", "megatron-core", "transformer-engine", "deepspeed", "triton", "flash-linear-attention")
_SUFFIXES = {".py", ".sbatch", ".txt", ".html", ".j2"}
_PRODUCT = 512


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as a process found it.

    Attributes:
        index: on its node.
        name: of the device.
        free: bytes.
        total: bytes.
        error: why it cannot be computed on; empty if it can.
    """

    index: int
    name: str = ""
    free: int = 0
    total: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Room in a folder.

    Attributes:
        path: of the folder.
        free: bytes; None: there is no such folder.
    """

    path: str
    free: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a process found.

    Attributes:
        rank: of the process.
        local_rank: on its node.
        node: its name, Slurm's where there is Slurm.
        processes: of this node.
        gpus_asked: GPUs that Slurm gave the job on this node, or 0.
        gpus_seen: by this process.
        gpus: those that this process looked at.
        memory: bytes that are free.
        spaces: by use: `run`, `temporary`, `shared memory`.
        versions: of the code and of what it runs on.
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


def look_around(folder: Path, environment: Mapping[str, str] = os.environ) -> Report:
    """Look at the node of this process.

    Args:
        folder: of the run's job.
        environment: RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, and Slurm's variables.
    """
    import torch

    processes, local_rank = int(environment["LOCAL_WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Not tempfile's: on a full disk that goes elsewhere by itself, and libraries of C do not.
    folders = {"run": folder, "temporary": Path(environment.get("TMPDIR", "/tmp")), "shared memory": Path("/dev/shm")}
    return Report(
        rank=int(environment["RANK"]),
        local_rank=local_rank,
        node=node_name(environment),
        processes=processes,
        gpus_asked=int(environment.get("SLURM_GPUS_ON_NODE") or 0),
        gpus_seen=seen,
        gpus=[_gpu(index) for index in range(local_rank, seen, processes)],
        memory=psutil.virtual_memory().available,
        spaces={use: Space(path=str(path), free=_free(path)) for use, path in folders.items()},
        versions=_versions(),
    )


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Slurm's name of this node, or the machine's."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _gpu(index: int) -> Gpu:
    """Multiply on a GPU and on the CPU: small whole numbers, of which sums in fp32 are exact in any order."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        a, b = (torch.randint(-4, 5, (_PRODUCT, _PRODUCT)).float() for _ in range(2))
        there = (a.to(f"cuda:{index}") @ b.to(f"cuda:{index}")).cpu()
    except RuntimeError as error:  # torch's own errors are of this kind
        return Gpu(index=index, error=str(error).splitlines()[0])
    wrong = int((there != a @ b).sum())
    problem = f"{wrong} of {_PRODUCT**2} numbers of a matrix product are wrong" if wrong else ""
    return Gpu(index=index, name=name, free=free, total=total, error=problem)


def _versions() -> dict[str, str]:
    found = {"code": code_digest(source.ROOT), "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_digest(root: Path) -> str:
    """Twelve hexadecimal digits that stand for the sources of our packages below a folder."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
