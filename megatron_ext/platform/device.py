"""Selection between CUDA with NCCL and the CPU with gloo: all code that differs between them.

Other code takes device and back-end from `Platform` and is identical on both.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Literal

import torch
import torch.distributed as dist

from megatron_ext.config.schema import PRECISIONS, ParallelConfig
from megatron_ext.platform import megatron_cpu
from megatron_ext.utils.errors import UserError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in PRECISIONS.items()}

# Dense bf16 matrix-product peaks in FLOP/s, from NVIDIA's data sheets, by a part of the device's name.
_PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12}

_CPU_MATRIX_SIZE, _CUDA_MATRIX_SIZE = 768, 4096
"""Sizes of the square matrices in `product_seconds`: milliseconds on a CPU, a fraction of one on a GPU."""


@dataclass(frozen=True)
class Platform:
    """Device and communication back-end of this process.

    Attributes:
        device: device of this process's tensors.
        communication: back-end of torch.distributed.
    """

    device: torch.device
    communication: Literal["nccl", "gloo"]

    @property
    def is_cuda(self) -> bool:
        """True for CUDA with NCCL."""
        return self.device.type == "cuda"

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this process in bytes: allocated on the GPU, or resident on the CPU."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Return the matrix-product peak in FLOP/s, the reference of MFU; None if unknown.

        On a GPU it is the data sheet's bf16 figure for every dtype, as is common for MFU. On the CPU it is measured
        now, with a matrix product in this process.
        """
        if not self.is_cuda:
            return 2 * _CPU_MATRIX_SIZE**3 / self.product_seconds(dtype)
        name = torch.cuda.get_device_name(self.device)
        return next((peak for part, peak in _PEAK_BF16.items() if part in name), None)

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def product_seconds(self, dtype: torch.dtype, repeats: int = 5) -> float:
        """Return the minimum time in seconds of a matrix product of fixed size, over several repeats."""
        size = _CUDA_MATRIX_SIZE if self.is_cuda else _CPU_MATRIX_SIZE
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        seconds = []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            torch.mm(a, b)
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def optimizer_context(self) -> AbstractContextManager[None]:
        """Return a context manager for Megatron calls that check tensors for CUDA types (see `megatron_cpu`)."""
        return megatron_cpu.tensor_types_as_cuda()


def prepare_megatron_import() -> None:
    """Prepare for the import of megatron-core, if called before it; otherwise `select_platform` does it later.

    Without CUDA nothing of Megatron is compiled. If it is disabled before the import, Megatron does not import torch's
    compiler, which saves a quarter of a rank's start-up time.
    """
    if not torch.cuda.is_available():
        megatron_cpu.install()


def platform_for_run(device: Literal["auto", "cpu", "cuda"], parallel: ParallelConfig) -> Platform:
    """Call `select_platform` for a rank of a run with this `run.device` and layout.

    Copy engines help only if their copies and earlier kernels do not wait for each other. With one queue per stream, a
    step of Top-1 Chunk on four H200s is 2 to 3 % shorter (docs/benchmarks/training.md).
    """
    one_queue = parallel.tensor > 1 or parallel.context_transport != "copy_engine"
    return select_platform(device, local_rank(), one_queue=one_queue)


def select_platform(
    device: Literal["auto", "cpu", "cuda"] = "auto", local_rank: int = 0, *, one_queue: bool = True
) -> Platform:
    """Choose the platform of this process and prepare megatron-core for it.

    Args:
        device: the configuration's `run.device`.
        local_rank: rank of this process on its machine: the index of its GPU.
        one_queue: True: all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, unless it is set).

    Raises:
        UserError: a GPU is requested and there is none, there are fewer GPUs than processes, or the CPU is requested on
            a machine with CUDA.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # DeepSpeed reads both variables, and would guess the first.
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if device == "cpu":
        if not torch.cuda.is_available():
            megatron_cpu.install()
            return Platform(torch.device("cpu"), "gloo")
        raise UserError(
            "run.device",
            "'cpu' on a machine with CUDA: megatron-core puts its tensors on the GPU it sees",
            "hide the GPUs with CUDA_VISIBLE_DEVICES= or use run.device=auto",
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= num_gpus:
        raise UserError(
            "run.device",
            f"'cuda' for local process {local_rank}, but this machine has {num_gpus} GPU(s)",
            "start at most one process a GPU, or use run.device=cpu",
        )
    if one_queue:
        # Required by Megatron: keeps kernels and collectives of tensor and sequence parallelism in launch order.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(local_rank)
    return Platform(torch.device("cuda", local_rank), "nccl")


def start_process_group(platform: Platform, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Initialise the default process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless there is one."""
    if not dist.is_initialized():
        device_id = platform.device if platform.is_cuda else None
        dist.init_process_group(platform.communication, timeout=timeout, device_id=device_id)


def local_rank() -> int:
    """Return the rank of this process on its machine, from LOCAL_RANK (default 0)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_backend(
    backend: Literal["auto", "local", "transformer_engine"], platform: Platform
) -> Literal["local", "transformer_engine"]:
    """Choose the source of norms and linear layers: Megatron or Transformer Engine.

    Raises:
        UserError: Transformer Engine is requested but cannot run here.
    """
    has_te = find_spec("transformer_engine") is not None
    if backend == "auto":
        return "transformer_engine" if has_te and platform.is_cuda else "local"
    if backend == "transformer_engine" and not (has_te and platform.is_cuda):
        reason = "is not installed" if platform.is_cuda else "needs a GPU"
        raise UserError(
            "run.backend",
            f"'transformer_engine' {reason}",
            "install the extra `selectron[gpu]` on a GPU machine, or use run.backend=local",
        )
    return backend
