from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hf_converted import LENGTH, VOCABULARY, Converted, converted
from torch import Tensor


@pytest.fixture(scope="session", autouse=True)
def _modules_in_a_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies a model's code to before it imports it."""
    pytest.importorskip("transformers", minversion="5")
    import transformers.dynamic_module_utils as loader

    before = loader.HF_MODULES_CACHE
    loader.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    loader.HF_MODULES_CACHE = before


@pytest.fixture(scope="module")
def convert(one_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Converted]:
    """See `converted`."""

    def make(pattern: str, mixers: dict[str, Any] | None = None, **sizes: Any) -> Converted:
        return converted(one_process, tmp_path_factory.mktemp("converted"), pattern, mixers, **sizes)

    return make


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    """[2, t], long enough for two chunks of any walk; not among them is the vocabulary's last, which pads."""
    return torch.randint(0, VOCABULARY - 1, (2, LENGTH), generator=torch.Generator().manual_seed(1))
