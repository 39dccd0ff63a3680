"""Conversion of training budgets (FLOPs or tokens) to optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.config.schema import RunConfig
from megatron_ext.config.sweep_file import PLAN
from megatron_ext.planning.counts import ModelCounts
from megatron_ext.utils.errors import UserError


def step_tokens(config: RunConfig) -> int:
    """Return the tokens per optimizer step."""
    return config.training.global_batch_size * config.data.seq_length


def planned_steps(name: str, budget: float, config: RunConfig, counts: Callable[[RunConfig], ModelCounts]) -> int:
    """Return the number of steps closest to a budget.

    Args:
        name: field of `PlanFields` that gives the budget.
        budget: value of that field.
        config: whole configuration of the run.
        counts: function that counts parameters and FLOPs of a configuration's model.

    Raises:
        UserError: the budget is less than a step.
    """
    per_step = float(step_tokens(config))
    if name == "training_flops":
        per_step *= counts(config).flops_per_token
    elif name == "tokens_per_parameter":
        per_step /= counts(config).parameters
    steps = round(budget / per_step)
    if steps < 1:
        hint = "increase it, or reduce training.global_batch_size"
        raise UserError(PLAN + name, f"{budget:g} is less than the {per_step:.4g} of one step", hint)
    return steps
