"""The `plan.` fields, separated from the fields of the run."""

from __future__ import annotations

import pytest

from megatron_ext.planning.fields import PlanFields, split_plan
from megatron_ext.utils.errors import UserError


def test_plan_fields_are_separated() -> None:
    fields = ["plan.tokens=1e+9", "optimizer.lr=1e-3", "plan.warmup_share=0.1"]
    plan, own, more = split_plan(fields, ["training.seed=2", "plan.tokens=2000000", "more.yaml"])
    assert plan == PlanFields(tokens=2e6, warmup_share=0.1)  # as for all fields, the last value counts
    assert (own, more) == (["optimizer.lr=1e-3"], ["training.seed=2", "more.yaml"])


def test_run_without_plan_fields() -> None:
    assert split_plan(["training.steps=5"], ["a=1"]) == (None, ["training.steps=5"], ["a=1"])


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            ["plan.tokens=1e9", "plan.training_flops=1e18"],
            "plan.tokens: 1e+09 is given, but so is plan.training_flops 1e+18; give one of them",
        ),
        (
            ["plan.tokens=1e9", "training.steps=5"],
            "training.steps: 5 is given, but follows from plan.tokens 1e+09; remove one of them",
        ),
        (
            ["plan.decay_share=0.1", "optimizer.decay_steps=5"],
            "optimizer.decay_steps: 5 is given, but follows from plan.decay_share 0.1; remove one of them",
        ),
        (["plan.tokens=0"], "plan.tokens: 0 is out of range; give a value greater than 0"),
        (["plan.tokens=many"], 'plan.tokens: "many" is not a number; give a number, without quotes'),
        (["plan.warmup_share=1"], "plan.warmup_share: 1 is out of range; give a value less than 1"),
        (["plan.flops=1e18"], "plan.flops: no such field; did you mean plan.training_flops?"),
    ],
)
def test_invalid_plan_fields(fields: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        split_plan(fields, [])
    assert str(caught.value) == line
