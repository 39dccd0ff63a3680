from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig
from megatron_ext.planning.counts import ModelCounter, process_pool


class SharedPool:
    """Replacement of a pool that submits to another pool, and leaves it running at the end."""

    def __init__(self, process: ProcessPoolExecutor) -> None:
        self._process = process

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._process.submit(function, *args)

    def shutdown(self) -> None: ...


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
    monkeypatch.setattr("megatron_ext.planning.plan.process_pool", lambda max_workers=None: SharedPool(process))


@pytest.fixture(scope="session")
def counter() -> Iterator[ModelCounter]:
    """Return a `ModelCounter` that assumes a tokenizer of 300 tokens, whatever data the configuration names."""
    with ModelCounter(lambda path, cache_dir: 300) as counter:
        yield counter


@pytest.fixture
def shared_counting_process(counter: ModelCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make other counters use the process of `counter`. It has process groups, so dry steps cannot run in it."""
    model = ModelConfig(pattern="attention", hidden_size=8, num_attention_heads=1, ffn_hidden_size=8)
    counter(RunConfig(data=DataConfig(path="none", seq_length=8), model=model))  # starts the process
    assert counter._process is not None
    pool = SharedPool(counter._process)
    monkeypatch.setattr("megatron_ext.planning.counts.process_pool", lambda max_workers: pool)


@pytest.fixture(scope="session")
def dry(process: ProcessPoolExecutor) -> Callable[..., Any]:
    """Return a caller that runs a function of `dry_runs` in the shared process, once for the same arguments."""
    results: dict[str, Any] = {}

    def call(function: Callable[..., Any], *args: Any) -> Any:
        key = f"{function.__name__} {args}"
        if key not in results:
            results[key] = process.submit(function, *args).result()
        return results[key]

    return call
