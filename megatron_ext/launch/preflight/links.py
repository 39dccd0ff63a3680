"""Bandwidth and latency between two nodes, measured by all-reduces between one process on each node."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

Pair = tuple[str, str]
"""Names of two nodes, in the order of the job's nodes."""

BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
"""Bytes of the tensor that measures bandwidth, by type of device."""

_REPEATS, _SMALL_REPEATS = 5, 20
_THREAD = "pair"


def max_seconds(seconds: float) -> float:
    """Return the seconds after which a measurement with a limit of `seconds` is abandoned.

    The margin is needed because libraries time out later than requested.
    """
    return seconds + min(seconds, 10.0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Result of the all-reduces between two processes.

    Attributes:
        pair: nodes of the processes.
        local_rank: local rank of both processes.
        bandwidth: bus bandwidth in GB/s, the best of five measurements. Bus bandwidth for n ranks is 2 (n - 1) / n
            times the tensor's bytes divided by the seconds, so for two ranks it is bytes divided by seconds.
        latency: seconds of an all-reduce of 4 bytes, median of 20 measurements.
        error: reason why the measurement failed; empty if it succeeded.
    """

    pair: Pair
    local_rank: int
    bandwidth: float = 0.0
    latency: float = 0.0
    error: str = ""


def schedule_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Distribute pairs over rounds of disjoint pairs, so that all pairs of a round can run in parallel."""
    schedule: list[list[Pair]] = []
    for pair in pairs:
        free = (round_pairs for round_pairs in schedule if not any(set(pair) & set(other) for other in round_pairs))
        chosen = next(free, None)
        if chosen is None:
            schedule.append([pair])
        else:
            chosen.append(pair)
    return schedule


def ring_pairs(nodes: Sequence[str]) -> list[Pair]:
    """Return the pairs of a ring: each node with the next node, and the last node with the first.

    The order of the pairs lets `schedule_rounds` distribute them over the fewest rounds.
    """
    if len(nodes) < 3:
        return [(nodes[0], nodes[1])] if len(nodes) == 2 else []
    pairs = [(node, nodes[(i + 1) % len(nodes)]) for i, node in enumerate(nodes)]
    return [*pairs[::2], *pairs[1::2]]


def measure_link(pair: Pair, local_rank: int, side: int, store: Store, device: torch.device, seconds: float) -> Link:
    """Measure the link to the process of the same local rank on the other node, in a process group of these two.

    Args:
        pair: names of the two nodes.
        local_rank: local rank of both processes.
        side: 0 or 1, this node's index in the pair.
        store: store that only these two processes use.
        device: device of the tensors; selects NCCL (GPU) or gloo (CPU).
        seconds: time limit for the measurement.
    """
    found: list[Link] = []

    def work() -> None:
        try:
            bandwidth, latency = _all_reduces(store, side, device, seconds)
            found.append(Link(pair=pair, local_rank=local_rank, bandwidth=bandwidth, latency=latency))
        except RuntimeError as error:  # base class of the errors of gloo, NCCL and the store
            found.append(Link(pair=pair, local_rank=local_rank, error=_short_message(error)))

    # A call into NCCL may never return. The daemon thread then ends with the process.
    thread = threading.Thread(target=work, daemon=True, name=_THREAD)
    thread.start()
    thread.join(max_seconds(seconds))
    timed_out = Link(pair=pair, local_rank=local_rank, error=f"no answer within {max_seconds(seconds):.0f} s")
    return found[0] if found else timed_out


def is_hanging() -> bool:
    """Return True if a measurement has not returned."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _short_message(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.rpartition("] ")[2][:120] or type(error).__name__


def _all_reduces(store: Store, side: int, device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the bandwidth in GB/s and the latency in seconds."""
    import torch

    group = _group(store, side, device, timedelta(seconds=seconds))
    large = torch.ones(BYTES[device.type] // 4, device=device)
    small = torch.ones(1, device=device)

    def call(tensor: torch.Tensor) -> float:
        _synchronize(device)
        start = time.perf_counter()
        group.allreduce([tensor]).wait()
        _synchronize(device)
        return time.perf_counter() - start

    call(small)
    call(large)  # warm-up: the first calls open the connections
    latencies = sorted(call(small) for _ in range(_SMALL_REPEATS))
    best = min(call(large) for _ in range(_REPEATS))
    # Each all-reduce over two ranks doubles the ones, including the warm-up.
    if int(large[0]) != 2 ** (_REPEATS + 1) or int(large.min()) != int(large.max()):
        raise RuntimeError("the sums of an all-reduce are wrong")
    group.shutdown()
    return large.numel() * 4 / best / 1e9, latencies[len(latencies) // 2]


def _group(store: Store, side: int, device: torch.device, limit: timedelta) -> Any:
    import torch.distributed as dist

    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, side, 2, limit)
    # By default, NCCL's watchdog would end this process when a pair fails, and a wait would only enqueue the work.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, side, 2, options)


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_clock_offset(
    read_other_clock: Callable[[], float], times: int = 5, clock: Callable[[], float] = time.time
) -> tuple[float, float]:
    """Return the offset of another clock from this one, estimated as NTP does.

    The other clock is read between two readings of this one. The offset is the other
    clock's time minus the midpoint of the two readings. The error of the offset is at most half the time between the
    two readings. The result with the smallest error bound is returned.

    Args:
        read_other_clock: returns the other clock's time.
        times: number of readings.
        clock: returns this clock's time.

    Returns:
        Offset in seconds (positive: the other clock is ahead) and its error bound in seconds.
    """
    readings = []
    for _ in range(times):
        before = clock()
        other_time = read_other_clock()
        after = clock()
        readings.append(((after - before) / 2, other_time - (before + after) / 2))
    error, offset = min(readings)
    return offset, error
