"""Fields of a sweep under `plan.`, from which configuration fields of its runs are derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from megatron_ext.config.load import read_fields
from megatron_ext.config.schema import STRICT
from megatron_ext.config.sweep_file import PLAN
from megatron_ext.config.validate import validate
from megatron_ext.utils.errors import UserError

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PlanFields:
    """Length of a run, by at most one budget, and fractions of its schedule.

    Attributes:
        training_flops: model FLOPs of forward and backward passes, as MFU counts them.
        tokens_per_parameter: training tokens divided by all parameters including embeddings, the default of
            `selectron fit`.
        tokens: number of training tokens.
        warmup_share: fraction of the steps for warm-up.
        decay_share: fraction of the steps for the final decay of the learning rate, for `optimizer.schedule` wsd.
    """

    training_flops: PositiveFloat | None = None
    tokens_per_parameter: PositiveFloat | None = None
    tokens: PositiveFloat | None = None
    warmup_share: Share | None = None
    decay_share: Share | None = None

    @property
    def budget(self) -> tuple[str, float] | None:
        """Name and value of the budget, or None without one."""
        given = [(name, getattr(self, name)) for name in BUDGETS if getattr(self, name) is not None]
        return given[0] if given else None


BUDGETS = ("training_flops", "tokens_per_parameter", "tokens")

DERIVED = {
    **dict.fromkeys(BUDGETS, "training.steps"),
    "warmup_share": "optimizer.warmup_steps",
    "decay_share": "optimizer.decay_steps",
}
"""Configuration field that is derived from each field of the plan."""


def split_plan(fields: Sequence[str], overrides: Sequence[str]) -> tuple[PlanFields | None, list[str], list[str]]:
    """Separate the plan from the other fields of a run.

    Args:
        fields: fields of the run from the sweep file, as NAME=VALUE.
        overrides: fields of all runs from the command line. They take precedence over derived fields.

    Returns:
        Plan (None without plan fields), and the remaining entries of `fields` and of `overrides`.

    Raises:
        UserError: there are several budgets, a field is both in the sweep file and derived, or a value is invalid.
    """
    plan_fields = [field.removeprefix(PLAN) for field in (*fields, *overrides) if field.startswith(PLAN)]
    run_fields, other_overrides = (
        [field for field in group if not field.startswith(PLAN)] for group in (fields, overrides)
    )
    if not plan_fields:
        return None, run_fields, other_overrides
    plan = validate(PlanFields, read_fields(plan_fields, PlanFields, PLAN), prefix=PLAN)
    budgets = [name for name in BUDGETS if getattr(plan, name) is not None]
    if len(budgets) > 1:
        first, second = ((PLAN + name, f"{getattr(plan, name):g}") for name in budgets[:2])
        raise UserError(second[0], f"{second[1]} is given, but so is {first[0]} {first[1]}", "give one of them")
    values = {name: value for name, _, value in (field.partition("=") for field in run_fields)}
    for name, derived in DERIVED.items():
        if getattr(plan, name) is not None and derived in values:
            problem = f"{values[derived]} is given, but follows from {PLAN}{name} {getattr(plan, name):g}"
            raise UserError(derived, problem, "remove one of them")
    return plan, run_fields, other_overrides
