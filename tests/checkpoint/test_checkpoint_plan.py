"""Reused plan of a save, compared with a new plan of the whole state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch

from megatron_ext.bench.steps import TimedRun
from megatron_ext.checkpoint.plan import Planner, RankPlan
from megatron_ext.checkpoint.state import backing_tensors, plain_state, run_state
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")
MIXERS = {"top1_chunk": {"chunk_size": 8}, "mamba2": {"state_size": 16}, "moba": {"block_size": 8, "top_k": 2}}
MIXERS["nsa"] = {"block_size": 4, "num_selected": 4, "window": 5}
ALL = ",".join(sorted(load_all()))


def trained(groups: Any, model: dict[str, Any], pattern: str, **optimizer: Any) -> TimedRun:
    used = {name: MIXERS[name] for name in pattern.split(",") if name in MIXERS}
    config = parity.run_config(pattern, used, model, {}, micro_batch_size=8, **optimizer)
    run = TimedRun(config, parity.VOCABULARY, groups, CPU)
    run.train()
    return run


def planned(planner: Planner, run: TimedRun, groups: Any, folder: Path) -> tuple[RankPlan, list[torch.Tensor]]:
    optimizer = run.trainer.optimizer
    slices = list(optimizer.slices())
    tensors = backing_tensors(optimizer, slices)
    if planner.is_settled:
        return planner.reuse(tensors, plain_state(optimizer, groups, CPU))
    return planner.plan(run_state(optimizer, slices, groups, CPU), tensors, folder)


def backing(run: TimedRun) -> list[torch.Tensor]:
    return backing_tensors(run.trainer.optimizer, list(run.trainer.optimizer.slices()))


def content(plan: RankPlan) -> Any:
    """Return the content of a plan, with byte entries as bytes."""
    files = {
        name: [(item, None if data is None else data.getvalue()) for item, data in items]
        for name, items in plan.files.items()
    }
    return files, plan.common


@pytest.mark.parametrize(
    ("model", "pattern", "optimizer"),
    [
        ({"num_query_groups": 4}, ALL, {"sharding": "megatron"}),
        ({"num_query_groups": 4}, ALL, {"sharding": "none", "precision": "bf16"}),
        ({"block": "rwkv7", "normalization": "layer_norm"}, "rwkv7,attention", {"sharding": "megatron"}),
        ({"tie_embeddings": True}, "attention", {"sharding": "none"}),
    ],
)
def test_a_settled_plan_equals_a_new_plan(
    one_process: Any, tmp_path: Path, model: dict[str, Any], pattern: str, optimizer: dict[str, Any]
) -> None:
    run = trained(one_process, model, pattern, **optimizer)
    planner, settled = Planner(), []
    for _ in range(4):
        settled.append(planner.is_settled)
        plan, tensors = planned(planner, run, one_process, tmp_path)
        run.train()
    assert settled == [False, False, True, True]
    plan, tensors = planned(planner, run, one_process, tmp_path)
    expected_plan, expected = planned(Planner(), run, one_process, tmp_path)
    assert content(plan) == content(expected_plan)
    assert plan.common["optimizer"]["schedule"]["num_steps"] == 5
    # Same memory, not only equal values.
    views = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    assert views == [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in expected]
    assert all(t.dim() == 1 for t in tensors)
    assert len(views) > 10


def test_a_settled_plan_follows_moved_tensors(one_process: Any, tmp_path: Path) -> None:
    run, planner = trained(one_process, {}, "attention", sharding="none"), Planner()
    optimizer = run.trainer.optimizer
    for _ in range(2):
        planned(planner, run, one_process, tmp_path)
    moved = [t.clone() + 1 for t in backing(run)]
    _, tensors = planner.reuse(moved, plain_state(optimizer, one_process, CPU))
    _, original = planned(planner, run, one_process, tmp_path)
    assert all(torch.equal(tensor, t + 1) for tensor, t in zip(tensors, original, strict=True))


def test_a_changed_structure_is_a_bug(one_process: Any, tmp_path: Path) -> None:
    run, planner = trained(one_process, {}, "attention", sharding="none"), Planner()
    for _ in range(2):
        planned(planner, run, one_process, tmp_path)
    optimizer = run.trainer.optimizer
    with pytest.raises(AssertionError, match="always has the same structure"):
        planner.reuse(backing(run)[:-1], plain_state(optimizer, one_process, CPU))


def test_a_tensor_outside_of_the_backing_tensors_is_a_bug(one_process: Any, tmp_path: Path) -> None:
    run, planner = trained(one_process, {}, "attention", sharding="none"), Planner()
    planned(planner, run, one_process, tmp_path)
    optimizer = run.trainer.optimizer
    copies = [t.clone() for t in backing(run)]
    state = run_state(optimizer, list(optimizer.slices()), one_process, CPU)
    with pytest.raises(AssertionError, match="is no view of the model or its optimizer"):
        planner.plan(state, copies, tmp_path)
