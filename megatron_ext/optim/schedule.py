"""The learning-rate schedule: Megatron's, over the parameter groups of any optimizer."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.config.schema import OptimizerConfig

_STYLES = {"cosine": "cosine", "wsd": "WSD", "constant": "constant"}


def make_schedule(optimizer: Any, config: OptimizerConfig, steps: int) -> OptimizerParamScheduler:
    """The schedule of a run, before its first step.

    Args:
        optimizer: anything with `param_groups`; a group's `wd_mult` multiplies its weight decay.
        config: of the optimizer.
        steps: of the whole run.
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


def go_on_from(schedule: OptimizerParamScheduler, saved: dict[str, Any]) -> int:
    """Go on where a saved schedule was, with the run's own rates, which may have changed.

    Returns:
        Steps done.
    """
    done = int(saved["num_steps"])
    schedule.num_steps = 0
    schedule.step(increment=done)
    return done
