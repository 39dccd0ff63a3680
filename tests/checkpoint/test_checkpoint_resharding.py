"""A checkpoint of one layout holds the same model and optimizer for every other, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import resharded
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

TP2_SP = {"tensor": 2, "sequence": True}


@pytest.fixture(scope="module")
def saved(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """A checkpoint of two tensor-parallel ranks, and the whole state that they held."""
    root = tmp_path_factory.mktemp("resharded") / "checkpoints"
    return root, pair.run(resharded.save, 2, root, TP2_SP)[0]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(1, {}), (2, TP2_SP), (2, {"pipeline": 2}), (2, {"pipeline": 2, "virtual_pipeline": 2})],
    ids=["one process", "tp2_sp", "pp2", "pp2_interleaved"],
)
def test_parameters_and_moments_are_the_same_on_another_layout(
    world_size: int, parallel: dict[str, Any], saved: Any, pair: Any
) -> None:
    root, expected = saved
    found, steps = pair.run(resharded.load, world_size, root, parallel)[0]
    assert steps == resharded.STEPS
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        assert [name for name, tensor in tensors.items() if not torch.equal(found[kind][name], tensor)] == []
    # The moments are there, and no kind of state is a copy of another.
    assert all(float(tensor.abs().max()) > 0 for tensor in expected["exp_avg_sq"].values())
    name = "embedding.word_embeddings.weight"
    assert not torch.equal(expected["exp_avg"][name], expected["parameters"][name])
    assert not torch.equal(expected["exp_avg"][name], expected["exp_avg_sq"][name])
