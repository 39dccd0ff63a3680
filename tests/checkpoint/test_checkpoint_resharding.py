"""Resharding: a checkpoint of one layout loads bit-identically under every other layout."""

from __future__ import annotations

from dataclasses import replace
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
    """Patterns of four-layer models that cover every mixer."""
    names = sorted(load_all())
    names += ["attention"] * (-len(names) % 4)
    return [",".join(names[i : i + 4]) for i in range(0, len(names), 4)]


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


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(1, {}), (2, TP2_SP), (2, {"pipeline": 2}), (2, {"pipeline": 2, "virtual_pipeline": 2})],
    ids=["one process", "tp2_sp", "pp2", "pp2_interleaved"],
)
def test_parameters_and_moments_are_the_same_on_another_layout(
    world_size: int, parallel: dict[str, Any], saved: Any, pool: Any
) -> None:
    run, expected = saved(HYBRID, 2, TP2_SP)
    found, steps = pool.run(resharded.load, world_size, replace(run, parallel=parallel))[0]
    assert steps == resharded.STEPS
    assert len(found) == 4
    _check(found, expected)
    # The moments exist, and no kind of state is a copy of another.
    assert all(float(tensor.abs().max()) > 0 for tensor in expected["exp_avg_sq"].values())
    name = "embedding.word_embeddings.weight"
    assert not torch.equal(expected["exp_avg"][name], expected["parameters"][name])
    assert not torch.equal(expected["exp_avg"][name], expected["exp_avg_sq"][name])


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(1, {}), (2, {"context": 2}), (4, TP2_SP)],
    ids=["one process", "cp2", "tp2_sp_dp2"],
)
def test_data_parallel_shards_are_the_same_on_another_layout(
    world_size: int, parallel: dict[str, Any], saved: Any, pool: Any
) -> None:
    run, expected = saved(PAIR, 4, {"context": 2})
    found, _ = pool.run(resharded.load, world_size, replace(run, parallel=parallel))[0]
    assert len(found) == 4
    _check(found, expected)


@pytest.mark.parametrize("pattern", _models_of_all_mixers())
def test_every_mixer_reshards_from_tp2_pp2(pattern: str, saved: Any, pool: Any) -> None:
    run, expected = saved(pattern, 4, TP2_PP2)
    found, _ = pool.run(resharded.load, 1, replace(run, parallel={}))[0]
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
    ("block", "world_size", "parallel"),
    [("rwkv7", 1, {}), ("rwkv7", 2, TP2_SP), ("mixer", 2, TP2_SP)],
    ids=["rwkv7-one process", "rwkv7-tp2_sp", "mixer-tp2_sp"],
)
def test_other_blocks_reshard_from_tp2_pp2(
    block: str, world_size: int, parallel: dict[str, Any], saved: Any, pool: Any
) -> None:
    pattern, model, name = BLOCKS[block]
    run, expected = saved(pattern, 4, TP2_PP2, model=model)
    assert name in expected["parameters"]
    assert any("mlp" in key for key in expected["parameters"]) is (block != "mixer")
    found, _ = pool.run(resharded.load, world_size, replace(run, parallel=parallel))[0]
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
    "zero2 cp2": (2, {"context": 2}, {"sharding": "zero2"}),
    "zero3 tp2_sp_dp2": (4, {"tensor": 2, "sequence": True}, {"sharding": "zero3"}),
    "zero3 offloaded": (2, {}, {"sharding": "zero3", "offload": "cpu", "offload_parameters": "cpu"}),
}


# All optimizers save in one format. Each loads a checkpoint of another one, and another one loads its checkpoint.
NAMES = list(OPTIMIZERS)
PAIRS = [(NAMES[i], NAMES[(i + step) % len(NAMES)]) for step in (1, 3) for i in range(len(NAMES))]
DEEP = "gated_deltanet,attention,attention,attention"


@pytest.mark.parametrize(("source", "target"), cases(every=PAIRS, default=PAIRS[: len(NAMES)]))
def test_optimizers_load_each_others_checkpoints(source: str, target: str, saved: Any, pool: Any) -> None:
    size, parallel, fields = OPTIMIZERS[source]
    run, expected = saved(DEEP, size, parallel, **fields)
    size, parallel, fields = OPTIMIZERS[target]
    found, steps = pool.run(resharded.load, size, replace(run, parallel=parallel, fields=fields))[0]
    assert steps == resharded.STEPS
    assert found.keys() == {"parameters", "param", "exp_avg", "exp_avg_sq"}
    _check(found, expected)


@pytest.fixture(scope="module")
def source_run(saved: Any, pool: Any) -> tuple[Run, list[float]]:
    """Run with a checkpoint, and its losses after the checkpoint."""
    size, parallel, fields = OPTIMIZERS["zero1 tp2_sp_pp2"]
    run, _ = saved(DEEP, size, parallel, **fields)
    return run, pool.run(resharded.continue_training, size, run)[0]


@pytest.mark.parametrize(
    "target",
    cases(
        every=[name for name in OPTIMIZERS if name != "zero1 tp2_sp_pp2"],
        default=["none tp2", "megatron pp2_dp2", "zero2 cp2", "zero3 offloaded"],
    ),
)
def test_losses_continue_under_another_optimizer(target: str, source_run: tuple[Run, list[float]], pool: Any) -> None:
    """Wrong moments, step counts or learning rates would change the losses of the following steps."""
    run, expected = source_run
    size, parallel, fields = OPTIMIZERS[target]
    found = pool.run(resharded.continue_training, size, replace(run, parallel=parallel, fields=fields))[0]
    assert found == pytest.approx(expected, abs=2e-6)
    assert max(expected) - min(expected) > 1e-3


@pytest.mark.parametrize(("source", "target"), [("megatron", "zero1"), ("zero3", "none"), ("none", "zero2")])
def test_fp32_parameters_of_bf16_runs_are_restored(source: str, target: str, saved: Any, pool: Any) -> None:
    run, expected = saved(PAIR, 2, {}, sharding=source, precision="bf16")
    found, _ = pool.run(resharded.load, 2, replace(run, fields={"sharding": target, "precision": "bf16"}))[0]
    _check(found, expected)
    name = "layer 1 mlp.linear_fc1.weight"
    assert torch.equal(expected["param"][name].bfloat16().float(), expected["parameters"][name])
    assert not torch.equal(expected["param"][name], expected["parameters"][name])
