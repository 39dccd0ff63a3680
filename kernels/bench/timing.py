"""Times by CUDA events with a cold L2 cache, peak memory, and the two measured peaks of the GPU."""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from kernels.bench.cases import OptionError

WARM_UP_RUNS = 3
WARM_UP_SECONDS = 0.1
PRODUCT_SIZE = 8192
COPY_BYTES = 4 * 2**30
FLUSH_BYTES = 256 * 2**20
"""Larger than any L2 cache; Triton's own benchmark uses the same size."""


class Times(NamedTuple):
    """Median with the 20 % and 80 % quantiles, milliseconds."""

    median: float
    q20: float
    q80: float


class Ceilings(NamedTuple):
    """Measured peaks of the GPU: operations per second of a bf16 product, bytes per second read plus written."""

    operations: float
    bytes: float


class Meter(Protocol):
    """Interface of a meter for one device."""

    def ceilings(self) -> Ceilings:
        """Measure both peaks."""

    def time(self, run: Callable[[], object]) -> Times:
        """Time one call."""

    def new_bytes(self, run: Callable[[], object]) -> int:
        """Return the peak memory of a call in bytes, including its result, beyond what was allocated before."""


def find_device(name: str) -> torch.device:
    """Find a GPU and make it torch's current device.

    Raises:
        OptionError: there is no such GPU.
    """
    if not torch.cuda.is_available():
        raise OptionError("device", "torch sees no GPU", "run on a machine with a GPU (check with `selectron doctor`)")
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count()
    if kind != "cuda" or (number and not (number.isdecimal() and int(number) < count)):
        raise OptionError("device", f"{name!r} does not exist", f"give cuda or cuda:0 to cuda:{count - 1}")
    device = torch.device("cuda", int(number or 0))
    torch.cuda.set_device(device)
    return device


class CudaMeter:
    """Meter for a GPU.

    Args:
        device: the GPU, torch's current one.
        repeat: timed runs.
    """

    def __init__(self, device: torch.device, repeat: int) -> None:
        self.device = device
        self.repeat = repeat

    def ceilings(self) -> Ceilings:
        """Measure a product of two random 8192 x 8192 matrices, and a copy of 4 GiB."""
        n = PRODUCT_SIZE
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = self.time(lambda: torch.matmul(a, b))
        source = torch.empty(COPY_BYTES // 4, device=self.device, dtype=torch.int32).random_()
        target = torch.empty_like(source)
        copy = self.time(lambda: target.copy_(source))
        return Ceilings(2.0 * n**3 / (product.median * 1e-3), 2.0 * COPY_BYTES / (copy.median * 1e-3))

    def time(self, run: Callable[[], object]) -> Times:
        """Warm up, then time `repeat` runs; the L2 cache is overwritten before each."""
        self._warm_up(run)
        flush = torch.empty(FLUSH_BYTES // 4, device=self.device, dtype=torch.int32)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeat)]
        for start, end in events:
            flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        return quantiles([start.elapsed_time(end) for start, end in events])

    def new_bytes(self, run: Callable[[], object]) -> int:
        """Measure with the statistics of torch's caching allocator."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def _warm_up(self, run: Callable[[], object]) -> None:
        """Run a few times to compile, autotune and raise the clocks."""
        run()
        torch.cuda.synchronize(self.device)
        start, runs = time.monotonic(), 1
        while runs < WARM_UP_RUNS or time.monotonic() - start < WARM_UP_SECONDS:
            run()
            torch.cuda.synchronize(self.device)
            runs += 1


def quantiles(milliseconds: list[float]) -> Times:
    """Return the quantiles of the times of all runs."""
    found = torch.tensor(milliseconds, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    return Times(*found.tolist())
