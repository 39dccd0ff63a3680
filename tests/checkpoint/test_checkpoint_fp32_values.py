"""Decays and steps in fp32 in bf16 runs: values equal the optimizer's, under any sharding and after any load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp32_values
import pytest
import torch
from resharded import STEPS, Run

PATTERN = "mamba,mamba2,gated_deltanet,gla"
NAMES = {
    1: ("A_log", "D", "dt_bias"),
    2: ("log_decay", "step_bias", "skip"),
    3: ("log_decay", "step_bias"),
    4: ("decay_bias",),
}
# Number of processes, layout and sharding of each run, which loads the checkpoint of the run before.
CHAIN: list[tuple[int, dict[str, Any], str]] = [
    (2, {}, "megatron"),
    (2, {}, "zero3"),
    (4, {"pipeline": 2}, "zero1"),
    (2, {}, "zero2"),
    (2, {"tensor": 2}, "none"),
    (2, {}, "megatron"),
]


def _check(state: fp32_values.State) -> None:
    """Check that the forward pass uses the optimizer's values, and that the parameters are their roundings."""
    assert state.used.keys() == {f"layer {n} self_attention.{name}" for n, names in NAMES.items() for name in names}
    for name, values in state.used.items():
        assert torch.equal(values, state.full["param"][name]), name
    for name, values in state.full["param"].items():
        assert torch.equal(values.bfloat16().float(), state.full["parameters"][name]), name


def _unrounded(state: fp32_values.State) -> set[str]:
    """Return the names, without those of the modules, of parameters whose values rounding to bf16 changes."""
    return {
        name.rsplit(".", 1)[-1] for name, x in state.used.items() if not torch.equal(x, state.full["parameters"][name])
    }


@pytest.mark.slow
def test_the_forward_pass_uses_the_optimizers_values(pool: Any, tmp_path: Path) -> None:
    """This holds before and after training. Another sharding's checkpoint restores the whole state bit for bit."""
    saved: fp32_values.State | None = None
    for number, (size, parallel, sharding) in enumerate(CHAIN):
        run = Run(tmp_path, PATTERN, parallel, {}, {"precision": "bf16", "sharding": sharding})
        before, after, model_values = pool.run(fp32_values.train, size, run, number * STEPS)[0]
        for state in (before, after):
            _check(state)
        assert [name for name, x in after.used.items() if torch.equal(x, before.used[name])] == [], sharding
        if saved is None:
            assert _unrounded(before) == {"A_log", "dt_bias", "log_decay", "step_bias"}
        else:
            assert model_values.keys() == saved.used.keys()
            assert [name for name, x in saved.used.items() if not torch.equal(x, model_values[name])] == [], sharding
            assert before.full.keys() == saved.full.keys() == {"parameters", "param", "exp_avg", "exp_avg_sq"}
            for kind, tensors in before.full.items():
                assert tensors.keys() == saved.full[kind].keys()
                changed = [name for name, x in tensors.items() if not torch.equal(x, saved.full[kind][name])]
                assert changed == [], (sharding, kind)
        saved = after


def test_checkpoints_with_rounded_parameters_load(pool: Any, tmp_path: Path) -> None:
    """Older versions saved rounded parameters. Resuming loads the optimizer's values, loading a model does not."""
    run = Run(tmp_path, PATTERN, {}, {}, {"precision": "bf16"})
    _, last, _ = pool.run(fp32_values.train, 1, run, 0, True)[0]
    loaded, model_values = pool.run(fp32_values.load, 1, run)[0]
    _check(loaded)
    for name, values in last.used.items():
        assert torch.equal(values, loaded.used[name])
        assert torch.equal(values.bfloat16().float(), model_values[name])
