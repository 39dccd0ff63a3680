from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from config_fakes import MIXERS, config_of

from megatron_ext.config.rules import check
from megatron_ext.config.trial import trial_config
from megatron_ext.utils.errors import UserError

LONG = {"steps": 1000, "evaluate_every": 100, "checkpoint_every": 50, "keep_every": 100}


@pytest.mark.parametrize(
    ("optimizer", "steps", "warmup", "decay"),
    [
        ({"warmup_steps": 0}, 5, 0, 0),
        ({"warmup_steps": 100}, 5, 0, 0),  # 0.5, rounded to even
        ({"warmup_steps": 300}, 10, 3, 0),
        ({"warmup_steps": 999}, 10, 9, 0),  # at least one step is not warm-up
        ({"warmup_steps": 999}, 1, 0, 0),
        ({"warmup_steps": 100, "decay_steps": 200, "schedule": "wsd"}, 10, 1, 2),
        ({"warmup_steps": 990, "decay_steps": 10, "schedule": "wsd"}, 10, 9, 1),
        ({"warmup_steps": 500, "decay_steps": 500, "schedule": "wsd"}, 1, 0, 1),
    ],
)
def test_trial_schedule_is_scaled(optimizer: dict[str, Any], steps: int, warmup: int, decay: int) -> None:
    whole = config_of(training=LONG, optimizer=optimizer)
    check(whole, 1, MIXERS)
    trial = trial_config(whole, steps)
    assert (trial.training.steps, trial.optimizer.warmup_steps, trial.optimizer.decay_steps) == (steps, warmup, decay)
    check(trial, 1, MIXERS)


def test_trial_keeps_model_and_batch() -> None:
    whole = config_of(training=LONG, run={"dir": "runs", "name": "a", "branch_from": "runs/b/checkpoints/step_4"})
    trial = trial_config(whole, 5)
    assert (trial.run.dir, trial.run.name, trial.run.branch_from) == ("runs/trials", "a", None)
    assert (trial.training.evaluate_every, trial.training.checkpoint_every) == (5, 5)
    assert trial.data.verify == "size"
    length = ("steps", "evaluate_every", "evaluate_suites_every", "checkpoint_every", "keep_every")
    same = replace(trial.training, **{name: getattr(whole.training, name) for name in length})
    assert replace(trial, training=same, data=whole.data, run=whole.run) == whole
    assert trial_config(config_of(training={"steps": 5}), 5).training.evaluate_every == 0


@pytest.mark.parametrize("steps", [0, 1001])
def test_trial_with_too_many_steps(steps: int) -> None:
    with pytest.raises(UserError) as refused:
        trial_config(config_of(training=LONG), steps)
    assert str(refused.value) == f"--trial: {steps} steps, but the run has training.steps 1000; give 1 to 1000"
