"""Resharding: a checkpoint of one layout loads bit-identically under every other layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import resharded
import torch
from covering import cases
from resharded import Run

from megatron_ext.mixers.core.registry import load_all

pytestmark = pytest.mark.slow

State = dict[str, dict[str, torch.Tensor]]
TP2_SP = {"tensor": 2, "sequence": True}
TP2_PP2 = {"tensor": 2, "pipeline": 2}
PAIR = "attention,gated_deltanet"
HYBRID = "top1_chunk,gated_deltanet,attention,top1_element"


def _models_of_all_mixers() -> list[str]:
    """Patterns of eight-layer models that cover every mixer."""
    names = sorted(load_all())
    names += ["attention"] * (-len(names) % 8)
    return [",".join(names[i : i + 8]) for i in range(0, len(names), 8)]


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Function that saves a model under a layout, once. Returns the run and the whole state of its ranks."""
    saved_runs: dict[str, tuple[Run, State]] = {}

    def save(
        pattern: str, world_size: int, parallel: dict[str, Any], *, model: dict[str, Any] | None = None, **fields: Any
    ) -> tuple[Run, State]:
        key = repr((pattern, world_size, parallel, model, fields))
        if key not in saved_runs:
            root = tmp_path_factory.mktemp("resharded") / "checkpoints"
            run = Run(root, pattern, parallel, model or {}, fields)
            saved_runs[key] = run, pool.run(resharded.save, world_size, run)[0]
        return saved_runs[key]

    return save


def _check(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for kind, tensors in found.items():
        assert expected[kind].keys() == tensors.keys()
        assert [name for name, tensor in tensors.items() if not torch.equal(expected[kind][name], tensor)] == []


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, {"pipeline": 2}),
    "pp2_interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "tp2_sp_dp2": (4, TP2_SP),
}


@pytest.mark.parametrize(
    "layout", cases(every=["one process", "tp2_sp", "pp2", "pp2_interleaved"], default=["pp2_interleaved"])
)
def test_parameters_and_moments_are_the_same_on_another_layout(layout: str, saved: Any, pool: Any) -> None:
    run, expected = saved(HYBRID, 2, TP2_SP)
    world_size, parallel = LAYOUTS[layout]
    found = pool.run(resharded.load, world_size, replace(run, parallel=parallel))[0]
    assert len(found) == 4
    _check(found, expected)
    # The moments exist, and no kind of state is a copy of another.
    assert all(float(tensor.abs().max()) > 0 for tensor in expected["exp_avg_sq"].values())
    name = "embedding.word_embeddings.weight"
    assert not torch.equal(expected["exp_avg"][name], expected["parameters"][name])
    assert not torch.equal(expected["exp_avg"][name], expected["exp_avg_sq"][name])


@pytest.mark.parametrize(
    "layout", cases(every=["one process", "cp2", "tp2_sp_dp2"], default=["one process", "tp2_sp_dp2"])
)
def test_data_parallel_shards_are_the_same_on_another_layout(layout: str, saved: Any, pool: Any) -> None:
    run, expected = saved(PAIR, 4, {"context": 2})
    world_size, parallel = LAYOUTS[layout]
    found = pool.run(resharded.load, world_size, replace(run, parallel=parallel))[0]
    assert len(found) == 4
    _check(found, expected)


@pytest.mark.parametrize("pattern", _models_of_all_mixers())
def test_every_mixer_reshards_from_tp2_pp2(pattern: str, saved: Any, pool: Any) -> None:
    run, expected = saved(pattern, 4, TP2_PP2)
    found = pool.run(resharded.load, 1, replace(run, parallel={}))[0]
    assert found["parameters"]
    _check(found, expected)


BLOCKS = {
    "rwkv7": (
        "attention,rwkv7",
        {"block": "rwkv7", "normalization": "layer_norm"},
        "layer 1 input_layernorm.norm.bias",
    ),
    "mixer": ("mamba,attention", {"block": "mixer"}, "layer 1 self_attention.A_log"),
}


@pytest.mark.parametrize(
    ("block", "layout"),
    cases(
        every=[("rwkv7", "one process"), ("rwkv7", "tp2_sp"), ("mixer", "tp2_sp")],
        default=[("rwkv7", "tp2_sp"), ("mixer", "tp2_sp")],
    ),
)
def test_other_blocks_reshard_from_tp2_pp2(block: str, layout: str, saved: Any, pool: Any) -> None:
    world_size, parallel = LAYOUTS[layout]
    pattern, model, name = BLOCKS[block]
    run, expected = saved(pattern, 4, TP2_PP2, model=model)
    assert name in expected["parameters"]
    assert any("mlp" in key for key in expected["parameters"]) is (block != "mixer")
    found = pool.run(resharded.load, world_size, replace(run, parallel=parallel))[0]
    _check(found, expected)


# All ways to shard optimizer state: each optimizer with two data-parallel shards, in addition to model parallelism.
OPTIMIZERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "none tp2": (2, {"tensor": 2}, {"sharding": "none"}),
    "megatron pp2_dp2": (4, {"pipeline": 2}, {"sharding": "megatron"}),
    "zero1 tp2_sp_pp2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}, {"sharding": "zero1"}),
    "zero1 interleaved dp2": (
        4,
        {"pipeline": 2, "virtual_pipeline": 2},
        {"sharding": "zero1", "micro_batch_size": 2},  # as many micro-batches as stages
    ),
    "zero1 dp2": (2, {}, {"sharding": "zero1"}),
    "zero2 cp2": (2, {"context": 2}, {"sharding": "zero2"}),
    "zero3 tp2_sp_dp2": (4, {"tensor": 2, "sequence": True}, {"sharding": "zero3"}),
    "zero3 offloaded": (2, {}, {"sharding": "zero3", "offload": "cpu", "offload_parameters": "cpu"}),
}


# All optimizers save in one format. In each of the first two chains, every optimizer loads another one's checkpoint.
NAMES = [name for name in OPTIMIZERS if name != "zero1 dp2"]
CHAINS = {
    "next": [*NAMES, NAMES[0]],
    "third": [NAMES[3 * i % len(NAMES)] for i in range(len(NAMES) + 1)],
    "zero1 to zero2": ["zero1 dp2", "zero2 cp2"],
    "pipeline to megatron": ["zero1 tp2_sp_pp2", "megatron pp2_dp2"],
}
DEEP = "gated_deltanet,attention,attention,attention"


@pytest.mark.parametrize("chain", cases(every=CHAINS, default=["next"]))
def test_optimizers_load_each_others_checkpoints(chain: str, pool: Any, tmp_path: Path) -> None:
    """Each run of a chain loads the previous one's checkpoint and trains further, with the same losses.

    Wrong moments, step counts or learning rates would change the losses of the steps after the checkpoint.
    """
    previous: resharded.Link | None = None
    for number, name in enumerate(CHAINS[chain]):
        size, parallel, fields = OPTIMIZERS[name]
        first = number * resharded.STEPS
        link = pool.run(resharded.continue_chain, size, Run(tmp_path, DEEP, parallel, {}, fields), first)[0]
        assert link.loaded.keys() == {"parameters", "param", "exp_avg", "exp_avg_sq"}, name
        assert link.loaded_steps == first, name
        if previous is not None:
            _check(link.loaded, previous.saved)
            assert link.losses == pytest.approx(previous.later_losses, abs=2e-6), name
            assert max(link.losses) - min(link.losses) > 1e-3, name
        previous = link
