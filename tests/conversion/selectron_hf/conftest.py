from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_converted import LENGTH, VOCABULARY, Converted, convert_model
from torch import Tensor


@pytest.fixture(scope="session", autouse=True)
def _with_transformers() -> None:
    pytest.importorskip("transformers", minversion="5")


@pytest.fixture(scope="module")
def convert(one_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Converted]:
    """Function that calls `convert_model` with a new folder."""

    def make(pattern: str, mixers: dict[str, Any] | None = None, **sizes: Any) -> Converted:
        return convert_model(one_process, tmp_path_factory.mktemp("converted"), pattern, mixers, **sizes)

    return make


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    """Tokens [2, t], long enough for two chunks of any scan. They exclude the padding, the last of the vocabulary."""
    return torch.randint(0, VOCABULARY - 1, (2, LENGTH), generator=torch.Generator().manual_seed(1))
