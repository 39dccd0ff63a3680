"""First step at which the learning rates of two schedules differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.schedule import first_different_rate

COSINE = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, schedule="cosine")
WSD = OptimizerConfig(lr=1e-3, min_lr=0.0, warmup_steps=10, schedule="wsd", decay_steps=20)
CONSTANT = OptimizerConfig(lr=1e-3, min_lr=0.0, warmup_steps=10, schedule="constant")


def cosine(step: int, steps: int) -> float:
    """Cosine schedule by the formula of Loshchilov and Hutter."""
    return 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - 10) / (steps - 10)))


@pytest.mark.parametrize(
    ("before", "steps_before", "after", "steps", "done", "first"),
    [
        (COSINE, 100, COSINE, 100, 100, None),
        (COSINE, 100, COSINE, 200, 10, None),  # only the warm-up is done
        (COSINE, 100, COSINE, 200, 100, 11),
        (COSINE, 100, replace(COSINE, lr=2e-3), 100, 5, 1),
        (COSINE, 100, replace(COSINE, min_lr=0.0), 100, 10, None),
        (COSINE, 100, replace(COSINE, warmup_steps=20), 100, 5, 1),
        (WSD, 100, WSD, 300, 80, None),
        (WSD, 100, WSD, 300, 81, 81),
        (WSD, 100, replace(WSD, decay_steps=50), 300, 80, None),
        (WSD, 100, replace(WSD, min_lr=1e-5), 100, 80, None),
        (WSD, 100, CONSTANT, 100, 80, None),
        (CONSTANT, 100, CONSTANT, 200, 100, None),
        (WSD, 1_000_000, WSD, 999_000, 999_500, 998_981),
    ],
)
def test_first_different_rate(
    before: OptimizerConfig, steps_before: int, after: OptimizerConfig, steps: int, done: int, first: int | None
) -> None:
    found = first_different_rate(before, steps_before, after, steps, done)
    assert (found and found[0]) == first


def test_different_rate_equals_schedules() -> None:
    found = first_different_rate(COSINE, 100, COSINE, 200, 50)
    assert found is not None
    step, before, after = found
    assert (before, after) == (pytest.approx(cosine(step, 100)), pytest.approx(cosine(step, 200)))
