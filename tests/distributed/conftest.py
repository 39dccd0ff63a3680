from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four processes for the whole session."""
    workers = WorkerPool(4)
    yield workers
    workers.stop()
