from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_ext.planning.counts import ModelCounter, process_pool


@pytest.fixture(scope="session")
def counter() -> Iterator[ModelCounter]:
    """Return a `ModelCounter` that assumes a tokenizer of 300 tokens, whatever data the configuration names."""
    with ModelCounter(lambda path, cache_dir: 300) as counter:
        yield counter


@pytest.fixture(scope="session")
def process() -> Iterator[ProcessPoolExecutor]:
    """Pool of one process without a GPU and without a process group.

    The tests share it, because starting it takes longer than most of the work that they submit.
    """
    with process_pool(1) as pool:
        yield pool


@pytest.fixture
def shared_process(process: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans use the shared process instead of starting their own."""
    monkeypatch.setattr("megatron_ext.planning.plan.process_pool", lambda max_workers=None: nullcontext(process))


@pytest.fixture(scope="session")
def dry(process: ProcessPoolExecutor) -> Callable[..., Any]:
    """Return a caller that runs a function of `dry_runs` in the shared process."""
    return lambda function, *args: process.submit(function, *args).result()
