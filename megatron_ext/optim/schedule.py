"""Megatron's learning-rate schedule over the parameter groups of any optimizer."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.config.schema import OptimizerConfig

_STYLES = {"cosine": "cosine", "wsd": "WSD", "constant": "constant"}


def make_schedule(optimizer: Any, config: OptimizerConfig, steps: int) -> OptimizerParamScheduler:
    """Create the schedule of a run, before its first step.

    Args:
        optimizer: any object with `param_groups`; `wd_mult` of a group multiplies its weight decay.
        config: settings of the optimizer.
        steps: steps of the whole run.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(steps, config.warmup_steps + 1),
        lr_decay_style=_STYLES[config.schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=config.decay_steps,
        lr_wsd_decay_style="linear",
    )


def resume_schedule(schedule: OptimizerParamScheduler, saved: dict[str, Any]) -> int:
    """Set a schedule to the step of a saved one. Rates are those of the current configuration, which may have changed.

    Returns:
        Number of steps done.
    """
    completed_steps = int(saved["num_steps"])
    schedule.num_steps = 0
    schedule.step(increment=completed_steps)
    return completed_steps


def first_different_rate(
    before: OptimizerConfig, steps_before: int, after: OptimizerConfig, steps: int, completed_steps: int
) -> tuple[int, float, float] | None:
    """Find the first completed step at which two schedules have different rates.

    If more than `_MAX_COMPARED_STEPS` steps are completed, about that many steps are compared, at regular intervals,
    and in addition the steps around each breakpoint of both schedules.

    Args:
        before: optimizer settings of the run that completed the steps.
        steps_before: `training.steps` of that run.
        after: optimizer settings of the run that is to continue.
        steps: `training.steps` of the run that is to continue.
        completed_steps: number of completed steps.

    Returns:
        (step, rate before, rate after), steps counted from 1; None if the rates are the same.
    """
    schedules = [make_schedule(_EmptyOptimizer(), before, steps_before), make_schedule(_EmptyOptimizer(), after, steps)]
    breakpoints = {step + offset for schedule in schedules for step in _breakpoints(schedule) for offset in (0, 1)}
    stride = -(-completed_steps // _MAX_COMPARED_STEPS)
    for step in sorted({*range(1, completed_steps + 1, max(stride, 1)), *breakpoints, completed_steps}):
        if not 1 <= step <= completed_steps:
            continue
        rates = []
        for schedule in schedules:
            schedule.num_steps = step
            rates.append(float(schedule.get_lr({})))
        if not math.isclose(*rates, rel_tol=_RATE_TOLERANCE, abs_tol=0.0):
            return step, rates[0], rates[1]
    return None


_MAX_COMPARED_STEPS = 4096
_RATE_TOLERANCE = 1e-9
"""Relative difference up to which rates count as equal, because equivalent formulas round differently."""


class _EmptyOptimizer:
    """Optimizer without parameters, for a schedule from which only the rates are needed."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


def _breakpoints(schedule: OptimizerParamScheduler) -> tuple[int, ...]:
    """Return the steps at which the schedule's formula changes."""
    return schedule.lr_warmup_steps, schedule.lr_decay_steps - (schedule.wsd_decay_steps or 0), schedule.lr_decay_steps
