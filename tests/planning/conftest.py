from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_ext.planning.counts import Counter, process_pool


@pytest.fixture(scope="session")
def counter() -> Iterator[Counter]:
    """Counts models whose tokenizer has 300 tokens, whatever data their configuration names."""
    with Counter(lambda path, cache_dir: 300) as counter:
        yield counter


@pytest.fixture(scope="session")
def process() -> Iterator[ProcessPoolExecutor]:
    """One that sees no GPU and is in no process group: starting it takes longer than most of what it is asked."""
    with process_pool(1) as pool:
        yield pool


@pytest.fixture
def kept_process(process: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan starts no processes of its own."""
    monkeypatch.setattr("megatron_ext.planning.plan.process_pool", lambda most=None: nullcontext(process))


@pytest.fixture(scope="session")
def dry(process: ProcessPoolExecutor) -> Callable[..., Any]:
    """Calls a function of `dry_runs` in that process."""
    return lambda function, *args: process.submit(function, *args).result()
