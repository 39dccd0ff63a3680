"""The one place that knows CUDA with NCCL from the CPU with gloo.

Everything else asks the `Platform` for its device and backend and is the same on both.
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

from megatron_ext import megatron_cpu
from megatron_ext.config.schema import PRECISIONS, ParallelConfig
from megatron_ext.errors import UserError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in PRECISIONS.items()}

# Dense bf16 matrix-product peaks in FLOP/s, from NVIDIA's data sheets, by a part of the device's name.
_PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12}

_CPU_SIZE, _CUDA_SIZE = 768, 4096
"""Of square matrices whose product is timed: some milliseconds of a processor, a fraction of one of a GPU."""


@dataclass(frozen=True)
class Platform:
    """Where this process computes and how it talks to the others.

    Attributes:
        device: device of this process's tensors.
        communication: torch.distributed's backend.
    """

    device: torch.device
    communication: Literal["nccl", "gloo"]

    @property
    def is_cuda(self) -> bool:
        """Whether this is CUDA with NCCL."""
        return self.device.type == "cuda"

    def peak_memory_bytes(self) -> int:
        """Largest memory this process has used: allocated on the GPU, or resident on the CPU."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Matrix-product peak in FLOP/s that utilisation (MFU) is a fraction of; None where it is not known.

        On a GPU the data sheet's bf16 figure, whatever the dtype, as the field counts it; on the CPU what a matrix
        product of this process reaches now, measured.
        """
        if not self.is_cuda:
            return 2 * _CPU_SIZE**3 / self.product_seconds(dtype)
        name = torch.cuda.get_device_name(self.device)
        return next((peak for part, peak in _PEAK_BF16.items() if part in name), None)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def product_seconds(self, dtype: torch.dtype, repeats: int = 5) -> float:
        """The least time that a matrix product of a fixed size takes this process now, of several."""
        size = _CUDA_SIZE if self.is_cuda else _CPU_SIZE
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
        """Stands around Megatron calls that ask tensors for their CUDA type (see `megatron_cpu`)."""
        return megatron_cpu.tensor_types_as_cuda()


def before_megatron() -> None:
    """To be called before megatron-core is imported, where that can be; `select_platform` makes up for it later.

    Without CUDA nothing of Megatron is compiled. Told so in time, it does not import torch's compiler either, which
    takes a quarter of the time in which a rank starts.
    """
    if not torch.cuda.is_available():
        megatron_cpu.install()


def platform_of(device: Literal["auto", "cpu", "cuda"], parallel: ParallelConfig) -> Platform:
    """`select_platform` for a rank of a run with this `run.device` and layout.

    What copy engines bring is not to wait behind kernels that were launched before it, nor they behind it: with a queue
    for each stream a step of Top-1 Chunk on four H200s is 2 to 3 % shorter (docs/benchmarks/training.md).
    """
    one_queue = parallel.tensor > 1 or parallel.context_transport != "copy_engine"
    return select_platform(device, local_rank(), one_queue=one_queue)


def select_platform(
    device: Literal["auto", "cpu", "cuda"] = "auto", local_rank: int = 0, *, one_queue: bool = True
) -> Platform:
    """Choose the platform of this process and make megatron-core ready for it.

    Args:
        device: the configuration's `run.device`.
        local_rank: rank of this process on its machine: the index of its GPU.
        one_queue: whether all streams share one to the GPU, unless CUDA_DEVICE_MAX_CONNECTIONS is set; see below.

    Raises:
        UserError: a GPU is asked for and there is none, or fewer than processes.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # DeepSpeed asks the environment for both, and would guess the first.
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
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise UserError(
            "run.device",
            f"'cuda' for local process {local_rank}, but this machine has {count} GPU(s)",
            "start at most one process a GPU, or use run.device=cpu",
        )
    if one_queue:
        # Megatron asks for it: kernels and exchanges of tensor and sequence parallelism keep the order they came in.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(local_rank)
    return Platform(torch.device("cuda", local_rank), "nccl")


def start_process_group(platform: Platform, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Join the default process group named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    if not dist.is_initialized():
        device_id = platform.device if platform.is_cuda else None
        dist.init_process_group(platform.communication, timeout=timeout, device_id=device_id)


def local_rank() -> int:
    """Rank of this process on its machine, from LOCAL_RANK (0 where it is not set)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_backend(
    backend: Literal["auto", "local", "transformer_engine"], platform: Platform
) -> Literal["local", "transformer_engine"]:
    """Megatron's modules for norms and linears: its own or Transformer Engine's.

    Raises:
        UserError: Transformer Engine is asked for where it cannot run.
    """
    have_te = find_spec("transformer_engine") is not None
    if backend == "auto":
        return "transformer_engine" if have_te and platform.is_cuda else "local"
    if backend == "transformer_engine" and not (have_te and platform.is_cuda):
        reason = "is not installed" if platform.is_cuda else "needs a GPU"
        raise UserError(
            "run.backend",
            f"'transformer_engine' {reason}",
            "install the extra `selectron[gpu]` on a GPU machine, or use run.backend=local",
        )
    return backend
