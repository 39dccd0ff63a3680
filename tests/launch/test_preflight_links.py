"""All-reduces between processes and clock offsets, with real processes over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from megatron_ext.launch.preflight import links
from megatron_ext.launch.preflight.links import (
    BYTES,
    Link,
    measure_clock_offset,
    measure_link,
    ring_pairs,
    schedule_rounds,
)

CPU = torch.device("cpu")
OTHER = """
import dataclasses, json, sys, torch
from torch.distributed import PrefixStore, TCPStore
from megatron_ext.launch.preflight.links import measure_link
store = PrefixStore("a", TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False))
print(json.dumps(dataclasses.asdict(measure_link(("n1", "n2"), 3, 1, store, torch.device("cpu"), 240))))
"""


TICK = 0.25
"""Seconds between two readings of the clock of this process."""


def test_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", OTHER, str(store.port)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=count(0.0, TICK).__next__))
    begun = time.monotonic()
    here = measure_link(("n1", "n2"), 3, 0, PrefixStore("a", store), CPU, 240)
    seconds = time.monotonic() - begun
    there = Link(**{**json.loads(other.communicate(timeout=120)[0]), "pair": ("n1", "n2")})
    assert here == Link(pair=("n1", "n2"), local_rank=3, bandwidth=BYTES["cpu"] / TICK / 1e9, latency=TICK)
    assert (there.pair, there.local_rank, there.error) == (("n1", "n2"), 3, "")
    # The first four messages of this size, and ten of the twenty small ones, ended in that time. No memory reaches the
    # upper bound.
    assert 4 * BYTES["cpu"] / seconds / 1e9 < there.bandwidth < 100
    assert 0 < there.latency < seconds / 10


def test_missing_process_times_out() -> None:
    begun = time.monotonic()
    link = measure_link(("n1", "n2"), 0, 0, HashStore(), CPU, 1)
    assert link.error
    assert link.bandwidth == 0
    assert time.monotonic() - begun < 120  # not the half hour after which gloo gives up


@pytest.mark.parametrize(("nodes", "turns"), [(2, 1), (3, 3), (4, 2), (7, 3), (64, 2)])
def test_rounds_have_each_node_once(nodes: int, turns: int) -> None:
    pairs = ring_pairs([f"n{i}" for i in range(nodes)])
    shared = schedule_rounds(pairs)
    assert len(shared) == turns
    assert sorted(pair for turn in shared for pair in turn) == sorted(pairs)
    for turn in shared:
        names = [node for pair in turn for node in pair]
        assert len(names) == len(set(names))


def test_the_offset_of_a_clock() -> None:
    """The other clock is 5 s ahead. Messages take 0.1 s there and 0.3 s back, except once 0.01 s each."""
    now = 100.0
    ways = [(0.1, 0.3), (0.01, 0.01), (0.3, 0.1)]

    def ask() -> float:
        nonlocal now
        there, back = ways.pop(0)
        now += there
        seen = now + 5
        now += back
        return seen

    ahead, error = measure_clock_offset(ask, times=3, clock=lambda: now)
    assert ahead == pytest.approx(5)
    assert error == pytest.approx(0.01)
