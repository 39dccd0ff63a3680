"""Parity of DeepSpeed's ZeRO stages and layouts with one process: losses, gradient norms and parameters."""

from __future__ import annotations

import json
import logging
import os
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import parity
import pytest
from covering import cases
from parity_cases import LAYOUTS, MODELS, Model, chunks, deep_enough
from pool import WorkerPool
from test_parity import BF16, _check, _reference, _train

from megatron_ext.config.schema import RunConfig

# Layouts with model parallelism and two data-parallel ranks, between which ZeRO shards.
WITH_TWO_REPLICAS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_sp_dp2": (4, {"tensor": 2, "sequence": True}),
    "cp2_dp2": (4, {"context": 2}),
    "pp2_dp2": (4, {"pipeline": 2}),
}
ALL = LAYOUTS | WITH_TWO_REPLICAS
# ZeRO stages handle parameters and gradients, independent of the mixer. So one model is compared under every kind of
# layout, and two more under those that shard their specific parts.
COMPARED = {
    "attention": ("dp2", "tp2_sp_dp2"),
    "top1_chunk_exact": ("dp2", "cp2_chunks"),
    "gated_deltanet": ("tp2", "tp2_sp", "cp2_states", "dp2", "pp2_interleaved", "tp2_pp2_sp", *WITH_TWO_REPLICAS),
}
QUICK = {("zero1", "pp2_dp2"), ("zero2", "tp2_sp_dp2"), ("zero3", "tp2_sp_dp2")}
STAGES = ("zero1", "zero2", "zero3")
EVERY = [
    (model, layout, sharding)
    for model, layouts in COMPARED.items()
    for layout in layouts
    for sharding in STAGES
    if sharding == "zero1" or ALL[layout][1].get("pipeline", 1) == 1
]
# By default, all stages are compared under data parallelism, alone and with tensor parallelism. ZeRO-2 and ZeRO-3 share
# DeepSpeed's engine, for which context parallelism only enlarges the group, so that one of them is enough elsewhere.
DEFAULT = [
    *(("gated_deltanet", layout, sharding) for layout in ("dp2", "tp2_sp_dp2") for sharding in STAGES),
    *(
        ("gated_deltanet", layout, "zero1")
        for layout in ("cp2_states", "cp2_dp2", "pp2_dp2", "pp2_interleaved", "tp2_pp2_sp")
    ),
    *(("gated_deltanet", layout, "zero3") for layout in ("tp2", "cp2_dp2")),
    *(("attention", "tp2_sp_dp2", "zero2"), ("top1_chunk_exact", "cp2_chunks", "zero3")),
]


def _cases() -> list[Any]:
    return [
        pytest.param(
            *(model, layout, sharding),
            id=f"{model}-{layout}-{sharding}",
            marks=() if model == "gated_deltanet" and (sharding, layout) in QUICK else pytest.mark.slow,
        )
        for model, layout, sharding in cases(EVERY, DEFAULT)
    ]


@pytest.mark.parametrize(("model", "layout", "sharding"), _cases())
def test_a_stage_gives_the_numbers_of_one_process(pool: WorkerPool, model: str, layout: str, sharding: str) -> None:
    world_size, parallel = ALL[layout]
    of = deep_enough(MODELS[model], parallel)
    _check(_train(pool, of, world_size, parallel, sharding=sharding), _reference(pool, of))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    cases(
        every=[{"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, LAYOUTS["tp2"][1]],
        default=[{"pipeline": 2, "virtual_pipeline": 2}, LAYOUTS["tp2"][1]],
    ),
    ids=str,
)
def test_tied_embeddings_under_zero1(pool: WorkerPool, parallel: dict[str, Any]) -> None:
    model = Model("top1_chunk,gated_deltanet,attention*2", chunks("exact"), {"tie_embeddings": True})
    outcome = _train(pool, model, 4 if parallel.get("pipeline") else 2, parallel, sharding="zero1")
    _check(outcome, _reference(pool, model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "offload"),
    [("zero1", ["offload"]), ("zero2", ["offload"]), ("zero3", ["offload", "offload_parameters"])],
)
def test_offloading_changes_no_number(pool: WorkerPool, sharding: str, offload: list[str]) -> None:
    fields = dict.fromkeys(offload, "cpu")
    outcome = _train(pool, MODELS["gated_deltanet"], 2, {}, sharding=sharding, **fields)
    _check(outcome, _reference(pool, MODELS["gated_deltanet"]))


@pytest.mark.slow
@pytest.mark.skipif("SELECTRON_TEST_NVME" not in os.environ, reason="needs libaio, and minutes to build an operator")
@pytest.mark.parametrize("sections", [["offload_optimizer"], ["offload_optimizer", "offload_param"]], ids="+".join)
def test_offloading_to_a_disk_changes_no_number(pool: WorkerPool, tmp_path: Path, sections: list[str]) -> None:
    model = Model("gated_deltanet*4", model={"ffn_hidden_size": 4096})  # tensors below 1 MiB are not offloaded to disk
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "pin_memory": False}
    of_parameters = {"max_in_cpu": 0, "buffer_size": 10**6}
    zero = {section: disk | (of_parameters if section == "offload_param" else {}) for section in sections}
    settings = tmp_path / "deepspeed.json"
    settings.write_text(json.dumps({"zero_optimization": zero}))
    config = parity.run_config(model.pattern, {}, model.model, {}, sharding="zero3", deepspeed=str(settings))
    outcome = pool.run(parity.train, 2, config, timeout=900.0)[0]
    _check(outcome, _reference(pool, model))
    assert len(list(tmp_path.glob("disk/**/optimizer/**/*.tensor.swp"))) >= 2 * 3
    assert bool(list(tmp_path.glob("disk/**/*_param.tensor.swp"))) == ("offload_param" in sections)


def _deepspeed_warnings(rank: int, world_size: int, config: RunConfig) -> list[str]:
    """Build a trainer, and return the warnings that DeepSpeed logs meanwhile."""
    import deepspeed

    handler = BufferingHandler(capacity=1000)
    deepspeed.utils.logger.addHandler(handler)
    try:
        parity.model_size(rank, world_size, config)
    finally:
        deepspeed.utils.logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer if record.levelno >= logging.WARNING]


def test_deepspeed_does_not_warn(pool: WorkerPool) -> None:
    config = parity.run_config("gated_deltanet*4", {}, {}, {}, sharding="zero3")
    assert pool.run(_deepspeed_warnings, 2, config) == [[], []]


def test_shared_out_weights_are_counted(pool: WorkerPool) -> None:
    of = {
        sharding: pool.run(
            parity.flops_per_token, 2, parity.run_config("gated_deltanet*4", {}, {}, {}, sharding=sharding)
        )
        for sharding in ("none", "zero3")
    }
    assert of["zero3"] == of["none"]
    assert of["none"][0] > 1e5
    sizes = {
        sharding: pool.run(parity.model_size, 2, parity.run_config("gated_deltanet*4", {}, {}, {}, sharding=sharding))
        for sharding in of
    }
    assert sizes["zero3"] == sizes["none"]
    assert sizes["none"][0].parameters > 1e5


@pytest.mark.slow
@pytest.mark.parametrize("sharding", cases(every=STAGES, default=["zero1", "zero3"]))
def test_recomputation_changes_no_number(pool: WorkerPool, sharding: str) -> None:
    outcome = _train(pool, MODELS["hybrid"], 2, {}, sharding=sharding, recompute="full")
    _check(outcome, _reference(pool, MODELS["hybrid"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "layout"),
    cases(
        every=[("zero1", "dp2"), ("zero2", "dp2"), ("zero3", "dp2"), ("zero3", "tp2_sp_dp2")],
        default=[("zero1", "dp2"), ("zero2", "dp2"), ("zero3", "tp2_sp_dp2")],
    ),
)
def test_stages_in_bf16_are_as_near_as_layouts_are(pool: WorkerPool, sharding: str, layout: str) -> None:
    world_size, parallel = ALL[layout]
    outcome = _train(pool, MODELS["gated_deltanet"], world_size, parallel, sharding=sharding, precision="bf16")
    _check(outcome, _reference(pool, MODELS["gated_deltanet"], precision="bf16"), *BF16)
