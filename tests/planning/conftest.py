from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_ext.planning.counts import Counter, process_pool


@pytest.fixture(scope="session")
def counter() -> Iterator[Counter]:
    """Counts models whose tokenizer has 300 tokens, whatever data their configuration names."""
    with Counter(lambda path, cache_dir: 300) as counter:
        yield counter


@pytest.fixture(scope="session")
def dry() -> Iterator[Callable[..., Any]]:
    """Calls a function of `dry_runs` in a process that sees no GPU and is in no process group."""
    with process_pool(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()
