from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ext.planning.counts import Counter


@pytest.fixture(scope="session")
def counter() -> Iterator[Counter]:
    """Counts models whose tokenizer has 300 tokens, whatever data their configuration names."""
    with Counter(lambda path, cache_dir: 300) as counter:
        yield counter
