from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The pool of processes is a module of the distributed tests, which need not be among those that are run.
sys.path.append(str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    """Four processes that work together as the ranks of a group."""
    from pool import WorkerPool

    workers = WorkerPool(4)
    yield workers
    workers.stop()
