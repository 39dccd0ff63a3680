"""Decays and steps in fp32 in bf16 runs: values equal the optimizer's, under any sharding and after any load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp32_values
import pytest
import torch
from resharded import Run

PATTERN = "mamba,mamba2,gated_deltanet,gla"
NAMES = {
    1: ("A_log", "D", "dt_bias"),
    2: ("log_decay", "step_bias", "skip"),
    3: ("log_decay", "step_bias"),
    4: ("decay_bias",),
}
TP2 = {"tensor": 2}


def _check(state: fp32_values.Values) -> None:
    """Check that the forward pass uses the optimizer's values, and that the parameters are their roundings."""
    assert state["used"].keys() == {f"layer {n} self_attention.{name}" for n, names in NAMES.items() for name in names}
    for name, values in state["used"].items():
        assert torch.equal(values, state["optimizer"][name]), name
        assert torch.equal(values.bfloat16().float(), state["rounded"][name]), name


@pytest.mark.parametrize(
    ("size", "parallel", "sharding", "target"),
    [
        (2, {}, "megatron", "zero3"),
        pytest.param(2, TP2, "none", "megatron", marks=pytest.mark.slow),
        pytest.param(2, {}, "zero2", "none", marks=pytest.mark.slow),
        (2, {}, "zero3", "zero1"),
        pytest.param(4, {"pipeline": 2}, "zero1", "zero2", marks=pytest.mark.slow),
    ],
)
def test_the_forward_pass_uses_the_optimizers_values(
    pool: Any, tmp_path: Path, size: int, parallel: dict[str, Any], sharding: str, target: str
) -> None:
    fields = {"precision": "bf16", "sharding": sharding}
    run = Run(tmp_path / "new", PATTERN, parallel, {}, fields)
    first, last = pool.run(fp32_values.train, size, run, False)[0]
    for state in (first, last):
        _check(state)
    changed = [name for name, values in last["used"].items() if not torch.equal(values, first["used"][name])]
    assert changed == list(last["used"])
    unrounded = [name for name, values in first["used"].items() if not torch.equal(values, first["rounded"][name])]
    assert {name.rsplit(".", 1)[-1] for name in unrounded} == {"A_log", "dt_bias", "log_decay", "step_bias"}
    other = Run(tmp_path / "new", PATTERN, {}, {}, {"precision": "bf16", "sharding": target})
    loaded, model_values = pool.run(fp32_values.load, 2, other)[0]
    _check(loaded)
    for name, values in last["used"].items():
        assert torch.equal(values, loaded["used"][name])
        assert torch.equal(values, model_values[name])


def test_checkpoints_with_rounded_parameters_load(pool: Any, tmp_path: Path) -> None:
    """Older versions saved rounded parameters. Resuming loads the optimizer's values, loading a model does not."""
    run = Run(tmp_path / "old", PATTERN, {}, {}, {"precision": "bf16"})
    _, last = pool.run(fp32_values.train, 1, run, True)[0]
    loaded, model_values = pool.run(fp32_values.load, 1, run)[0]
    _check(loaded)
    for name, values in last["used"].items():
        assert torch.equal(values, loaded["used"][name])
        assert torch.equal(values.bfloat16().float(), model_values[name])
