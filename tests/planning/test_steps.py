"""Number of steps for a token or compute budget."""

from __future__ import annotations

import pytest

from megatron_ext.config.schema import DataConfig, RunConfig, TrainingConfig
from megatron_ext.planning.counts import ModelCounts
from megatron_ext.planning.steps import planned_steps
from megatron_ext.utils.errors import UserError

CONFIG = RunConfig(data=DataConfig(path="none", seq_length=100), training=TrainingConfig(global_batch_size=10))
COUNTS = ModelCounts(parameters=50_000, flops_per_token=3e5)  # a step has 1,000 tokens and takes 3e8 FLOPs


@pytest.mark.parametrize(
    ("name", "budget", "steps"),
    [
        ("tokens", 7400.0, 7),
        ("tokens", 7600.0, 8),
        ("tokens", 501.0, 1),
        ("training_flops", 3e9, 10),
        ("training_flops", 1.001e10, 33),
        ("tokens_per_parameter", 20.0, 1000),
    ],
)
def test_the_nearest_number(name: str, budget: float, steps: int) -> None:
    assert planned_steps(name, budget, CONFIG, lambda _: COUNTS) == steps


@pytest.mark.parametrize(
    ("name", "budget", "line"),
    [
        ("tokens", 499.0, "plan.tokens: 499 is less than the 1000 of one step;"),
        ("training_flops", 1e8, "plan.training_flops: 1e+08 is less than the 3e+08 of one step;"),
        ("tokens_per_parameter", 0.001, "plan.tokens_per_parameter: 0.001 is less than the 0.02 of one step;"),
    ],
)
def test_less_than_a_step(name: str, budget: float, line: str) -> None:
    with pytest.raises(UserError) as caught:
        planned_steps(name, budget, CONFIG, lambda _: COUNTS)
    assert str(caught.value) == f"{line} increase it, or reduce training.global_batch_size"
