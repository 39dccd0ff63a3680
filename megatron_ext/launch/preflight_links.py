"""How fast two nodes talk: an all-reduce between one process of each, in a group of their own."""

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
_REPEATS, _SMALL_REPEATS = 5, 20
_THREAD = "pair"


def longest(seconds: float) -> float:
    """Seconds after which a pair is given up, its time limit plus some for libraries that heed it late."""
    return seconds + min(seconds, 10.0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What an all-reduce between two processes showed.

    Attributes:
        pair: their nodes.
        local_rank: of both.
        bandwidth: bus bandwidth in GB/s, of the best of five. For n ranks it is 2 (n - 1) / n times the bytes of the
            tensor over the seconds, what each must send and receive; for two the bytes over the seconds.
        latency: seconds of an all-reduce of 4 bytes, the median of 20.
        error: why there is neither; empty if there is.
    """

    pair: Pair
    local_rank: int
    bandwidth: float = 0.0
    latency: float = 0.0
    error: str = ""


def rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Share pairs out over rounds, so that no node is twice in one: all of a round talk at once."""
    shared: list[list[Pair]] = []
    for pair in pairs:
        free = (one for one in shared if not any(set(pair) & set(other) for other in one))
        chosen = next(free, None)
        if chosen is None:
            shared.append([pair])
        else:
            chosen.append(pair)
    return shared


def ring(nodes: Sequence[str]) -> list[Pair]:
    """Each node with the next, and the last with the first; in the order in which `rounds` makes the fewest rounds."""
    if len(nodes) < 3:
        return [(nodes[0], nodes[1])] if len(nodes) == 2 else []
    around = [(one, nodes[(i + 1) % len(nodes)]) for i, one in enumerate(nodes)]
    return [*around[::2], *around[1::2]]


def measure(pair: Pair, local_rank: int, end: int, store: Store, device: torch.device, seconds: float) -> Link:
    """Talk to the process of the same local rank on the other node; a group that fails takes no other with it.

    Args:
        pair: this node and the other one, in the pair's order.
        local_rank: of both processes.
        end: 0 or 1, this node's place in the pair.
        store: of this pair alone.
        device: of the tensors: NCCL on a GPU, gloo on the CPU.
        seconds: limit for all of it.
    """
    found: list[Link] = []

    def work() -> None:
        try:
            bandwidth, latency = _all_reduces(store, end, device, seconds)
            found.append(Link(pair=pair, local_rank=local_rank, bandwidth=bandwidth, latency=latency))
        except RuntimeError as error:  # gloo's, NCCL's and the store's are of this kind
            found.append(Link(pair=pair, local_rank=local_rank, error=_first_line(error)))

    # A call into NCCL may never come back; the thread then ends with the process.
    thread = threading.Thread(target=work, daemon=True, name=_THREAD)
    thread.start()
    thread.join(longest(seconds))
    late = Link(pair=pair, local_rank=local_rank, error=f"no answer within {longest(seconds):.0f} s")
    return found[0] if found else late


def hanging() -> bool:
    """Whether a call of a pair has not come back."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.rpartition("] ")[2][:120] or type(error).__name__


def _all_reduces(store: Store, end: int, device: torch.device, seconds: float) -> tuple[float, float]:
    """Bandwidth in GB/s and latency in seconds."""
    import torch

    group = _group(store, end, device, timedelta(seconds=seconds))
    large = torch.ones(BYTES[device.type] // 4, device=device)
    small = torch.ones(1, device=device)

    def call(tensor: torch.Tensor) -> float:
        _synchronize(device)
        start = time.perf_counter()
        group.allreduce([tensor]).wait()
        _synchronize(device)
        return time.perf_counter() - start

    call(small)
    call(large)  # connections are made at the first one
    latencies = sorted(call(small) for _ in range(_SMALL_REPEATS))
    best = min(call(large) for _ in range(_REPEATS))
    # Ones, added up over two ranks as often as they were reduced.
    if int(large[0]) != 2 ** (_REPEATS + 1) or int(large.min()) != int(large.max()):
        raise RuntimeError("the sums of an all-reduce are wrong")
    group.shutdown()
    return large.numel() * 4 / best / 1e9, latencies[len(latencies) // 2]


def _group(store: Store, end: int, device: torch.device, limit: timedelta) -> Any:
    import torch.distributed as dist

    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, end, 2, limit)
    # Else its watchdog would end this process with the pair, and a wait would only queue the work.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, end, 2, options)


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def offset(ask: Callable[[], float], times: int = 5, clock: Callable[[], float] = time.time) -> tuple[float, float]:
    """By how much another clock is ahead of this one, as NTP reckons.

    The other is read between two readings of this one; its offset is its time minus the middle of theirs, off by at
    most half their distance. The closest of some readings is taken.

    Args:
        ask: the other clock's time.
        times: readings.
        clock: this one.

    Returns:
        Seconds it is ahead, and seconds by which that may be wrong.
    """
    readings = []
    for _ in range(times):
        before = clock()
        there = ask()
        after = clock()
        readings.append(((after - before) / 2, there - (before + after) / 2))
    error, ahead = min(readings)
    return ahead, error
