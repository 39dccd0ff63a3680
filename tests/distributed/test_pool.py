"""Pool of processes: results, tracebacks, deaths and hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import parity
import pytest
import torch
import torch.distributed as dist
from pool import WorkerFailed, WorkerPool, start_process


def _sum_of_ranks(rank: int, world_size: int, extra: int) -> tuple[int, int, int]:
    total = torch.tensor(rank + extra)
    dist.all_reduce(total)
    return rank, dist.get_world_size(), int(total)


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def _hang(rank: int, world_size: int) -> None:
    time.sleep(600)


def _less_patient(collect: Callable[..., Any]) -> Callable[..., Any]:
    """Give the workers a second to answer, but more time to form their group."""
    return lambda size, deadline, folder: collect(size, time.monotonic() + 1.0, folder)


def _die(rank: int, world_size: int) -> None:
    os.abort()


def _environment(rank: int, world_size: int) -> tuple[int, bool, int]:
    return torch.get_num_threads(), torch.cuda.is_available(), os.getpid()


def test_workers_form_a_group_of_any_size_again_and_again(pool: WorkerPool) -> None:
    for size in (1, 4, 2, 3):
        expected = size * 10 + sum(range(size))
        assert pool.run(_sum_of_ranks, size, 10) == [(rank, size, expected) for rank in range(size)]


def test_workers_stay_and_have_one_thread_and_no_gpu(pool: WorkerPool) -> None:
    pool.stop()
    first, second = (pool.run(_environment, 2) for _ in range(2))
    assert first == second
    assert [answer[:2] for answer in first] == [(1, False)] * 2


def test_workers_are_replaced_after_so_many_calls(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "max_calls", 2)
    pool.stop()
    processes = [pool.run(_environment, 1)[0][2] for _ in range(5)]
    assert processes[0] == processes[1] != processes[2] == processes[3] != processes[4]


def _threads(rank: int, world_size: int) -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_case_leaves_no_process_groups_behind(pool: WorkerPool) -> None:
    """Models that are not freed hold groups with polling threads: thousands after some hundred cases."""
    config = parity.run_config("attention,gla,rwkv6,rwkv7", {}, {}, {"tensor": 2}, micro_batch_size=8)
    counts = []
    pool.stop()
    for _ in range(3):
        pool.run(parity.train, 2, config)
        counts.append(pool.run(_threads, 2))
    assert counts[1] == counts[2]
    assert max(counts[0]) < 30


def _module_numbers(rank: int, world_size: int) -> list[int]:
    """Let DeepSpeed number a module and its child, as it does for ZeRO-3, and return both numbers."""
    import deepspeed.runtime.zero.parameter_offload as offload

    module = torch.nn.Sequential(torch.nn.Identity())
    zero3 = offload.DeepSpeedZeRoOffload.__new__(offload.DeepSpeedZeRoOffload)  # without its process group
    zero3.module, zero3.forward_hooks, zero3.backward_hooks = None, [], []
    zero3._register_deepspeed_module(module)
    return [module.ds_id, module[0].ds_id]


def test_deepspeed_numbers_modules_from_zero_in_every_call(pool: WorkerPool) -> None:
    """The first call builds a model on one rank alone. The ranks of the second must agree nevertheless."""
    assert pool.run(_module_numbers, 1) == [[0, 1]]
    assert pool.run(_module_numbers, 2) == [[0, 1]] * 2


def test_a_module_that_cannot_be_preloaded_ends_the_process(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server itself ignores such a module."""
    pool.run(_environment, 1)  # starts the fork server with the modules of other tests
    for modules, code in ((["json"], 0), (["no_such_module"], 1)):
        monkeypatch.setattr("pool._PRELOADED", modules)
        process = start_process(abs, -1)
        process.join(60)
        assert process.exitcode == code


@pytest.mark.slow
def test_failures_are_reported_and_the_next_call_works() -> None:
    pool = WorkerPool(2)
    pool.grace = 120.0  # the rank with the reason may answer last
    try:
        with pytest.raises(WorkerFailed, match=r"rank 1 raised\nTraceback(.|\n)*ValueError: the reason"):
            pool.run(_fail_on_one, 2)
        with pytest.raises(WorkerFailed, match=r"rank [01] died\nFatal Python error: Aborted(.|\n)* in _die\n"):
            pool.run(_die, 2)
        assert [rank for rank, _, _ in pool.run(_sum_of_ranks, 2, 0)] == [0, 1]
        with (
            patch.object(pool, "_collect", _less_patient(pool._collect)),
            pytest.raises(WorkerFailed, match=r"rank\(s\) \[0, 1\] did not answer in time"),
        ):
            pool.run(_hang, 2)
        assert pool._workers == []
    finally:
        pool.stop()
