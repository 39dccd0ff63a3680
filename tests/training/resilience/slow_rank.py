"""Function run by each rank: a run whose last rank waits for its samples."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import whole_run

from megatron_ext.data.datasets import step_batches

TICK = 1e-3
"""Seconds between two readings of the clock."""


def run(rank: int, world_size: int, path: Path, overrides: list[str], seconds: float) -> str:
    """Train, with the last rank's samples delayed by `seconds`. Return the rank's standard error.

    The training loop reads a clock that advances by `TICK` per reading and by the delay, so that a busy machine delays
    no rank.
    """
    now = 0.0

    def read_clock() -> float:
        nonlocal now
        now += TICK
        return now

    def late(*arguments: Any, **named: Any) -> Any:
        nonlocal now
        if rank == world_size - 1:
            now += seconds
        return step_batches(*arguments, **named)

    clock = patch("megatron_ext.training.loop.time", SimpleNamespace(perf_counter=read_clock))
    with clock, patch("megatron_ext.training.loop.step_batches", late), redirect_stderr(io.StringIO()) as errors:
        whole_run.run(rank, world_size, path, overrides)
    return errors.getvalue()
