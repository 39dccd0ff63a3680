"""Initial weights of a run are bit-identical under every layout."""

from __future__ import annotations

from typing import Any

import exchanges
import parity
import pytest
import torch
from pool import WorkerPool

LAYOUTS = [
    (2, {"tensor": 2, "sequence": False}),
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
    (2, {"context": 2}),
    (4, {"tensor": 4}),
    (4, {"tensor": 2, "pipeline": 2}),
]
PATTERN = "top1_chunk,gated_deltanet,attention,top1_element"


def _initial(pool: WorkerPool, world_size: int, parallel: dict[str, Any], **model: Any) -> dict[str, torch.Tensor]:
    mixers: dict[str, dict[str, Any]] = {"attention": {"position_encoding": "learned"}}
    config = parity.run_config(PATTERN, mixers, model, parallel)
    return pool.run(exchanges.initial_weights, world_size, config)[0]


@pytest.fixture(scope="module")
def of_one_process(pool: WorkerPool) -> dict[bool, dict[str, torch.Tensor]]:
    """Initial weights in one process, by whether embeddings are tied."""
    return {tied: _initial(pool, 1, {}, tie_embeddings=tied) for tied in (False, True)}


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS)
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_every_layout_starts_from_the_same_bits(
    pool: WorkerPool,
    of_one_process: dict[bool, dict[str, torch.Tensor]],
    world_size: int,
    parallel: dict[str, Any],
    tie_embeddings: bool,
) -> None:
    one = of_one_process[tie_embeddings]
    several = _initial(pool, world_size, parallel, tie_embeddings=tie_embeddings)
    assert several.keys() == one.keys()
    for name, value in one.items():
        assert torch.equal(several[name], value), name


def test_two_matrices_of_a_channel_mix_start_from_the_same_bits(pool: WorkerPool) -> None:
    """The first matrix has no gate, so tensor parallelism does not split it by halves."""
    one, two = (_initial(pool, size, {"tensor": size}, block="rwkv7") for size in (1, 2))
    assert one["layer 1 mlp.linear_fc1.weight"].shape == (256, 64)
    assert [name for name, value in one.items() if not torch.equal(two[name], value)] == []


@pytest.mark.parametrize(("block", "into_stream"), [("transformer", 2 * 4), ("mixer", 4)])
def test_no_two_weights_begin_alike_and_each_has_its_spread(pool: WorkerPool, block: str, into_stream: int) -> None:
    weights = _initial(pool, 1, {}, block=block)
    matrices = {name: value for name, value in weights.items() if name.endswith("weight") and value.dim() == 2}
    assert len({tuple(value.flatten()[:4].tolist()) for value in matrices.values()}) == len(matrices)
    for name, value in matrices.items():
        into_residual = name.endswith(("out_proj.weight", "linear_fc2.weight"))
        expected = 0.02 / into_stream**0.5 if into_residual else 0.02
        assert float(value.std()) == pytest.approx(expected, rel=0.1), name
    for name, value in weights.items():
        if name.endswith(("layernorm.weight", "norm_weight")):
            assert value.unique().tolist() == [1.0], name
