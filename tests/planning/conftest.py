from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_ext.planning.counts import Counter, process_pool


@pytest.fixture(scope="session")
def counter() -> Iterator[Counter]:
    """Return a `Counter` that assumes a tokenizer of 300 tokens, whatever data the configuration names."""
    with Counter(lambda path, cache_dir: 300) as counter:
        yield counter


@pytest.fixture(scope="session")
def process() -> Iterator[ProcessPoolExecutor]:
    """Pool of one process without a GPU and without a process group.

    The tests share it, because starting it takes longer than most of the work that they submit.
    """
    with process_pool(1) as pool:
        yield pool


@pytest.fixture
def kept_process(process: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans use the shared process instead of starting their own."""
    monkeypatch.setattr("megatron_ext.planning.plan.process_pool", lambda most=None: nullcontext(process))


@pytest.fixture(scope="session")
def dry(process: ProcessPoolExecutor) -> Callable[..., Any]:
    """Return a caller that runs a function of `dry_runs` in the shared process."""
    return lambda function, *args: process.submit(function, *args).result()
