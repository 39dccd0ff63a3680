"""IsoFLOP parabolas against the law that the points were made with."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.analysis.scaling.isoflop import best_sizes, budgets
from megatron_ext.analysis.scaling.law import ScalingLaw
from megatron_ext.analysis.scaling.points import Points

LAW = ScalingLaw(1.7, 400.0, 400.0, 0.35, 0.35)
"""Whose loss over the logarithm of size is the same on both sides of the lowest, so that a parabola finds that."""

FLOPS = np.geomspace(1e19, 1e21, 5)


def points(width: float = 3.0, sizes: int = 9) -> Points:
    n = np.concatenate([LAW.best_params(c) * np.geomspace(1 / width, width, sizes) for c in FLOPS])
    d = np.repeat(FLOPS, sizes) / 6 / n
    return Points(n, d, LAW.loss(n, d))


def test_the_lowest_place_is_that_of_the_law() -> None:
    found = budgets(points())
    np.testing.assert_allclose([one.flops for one in found], FLOPS)
    np.testing.assert_allclose([one.best_params for one in found], LAW.best_params(FLOPS), rtol=1e-6)
    np.testing.assert_allclose([6 * one.best_params * one.best_tokens for one in found], FLOPS)
    best = best_sizes(found)
    assert best is not None
    assert best.exponent == pytest.approx(0.5)
    assert best.factor * 1e20**best.exponent == pytest.approx(float(LAW.best_params(1e20)), rel=1e-6)


def test_points_in_any_order_and_of_about_the_same_compute() -> None:
    dice, some = np.random.default_rng(2), points()
    jitter = np.exp(dice.uniform(-0.03, 0.03, len(some)))
    shuffled = Points(some.params, some.tokens * jitter, some.losses).take(dice.permutation(len(some)))
    assert [len(one.points) for one in budgets(shuffled)] == [9] * 5


def test_too_few_sizes_are_no_budget() -> None:
    assert budgets(points(sizes=3)) == []
    assert best_sizes([]) is None


def test_a_lowest_place_beyond_the_sizes_is_none() -> None:
    some = points()
    rising = some.take(some.params >= np.repeat(LAW.best_params(FLOPS), 9) * 1.2)
    assert {one.best_params for one in budgets(rising)} == {None}
    assert best_sizes(budgets(rising)) is None


def test_other_points_between_the_budgets_do_not_join_them() -> None:
    some, dice = points(), np.random.default_rng(4)
    n, d = (np.exp(dice.uniform(*np.log(bounds), 12)) for bounds in ((1e8, 1e10), (1e9, 1e11)))
    both = Points(
        *(np.concatenate(pair) for pair in ((some.params, n), (some.tokens, d), (some.losses, LAW.loss(n, d))))
    )
    found = budgets(both)
    assert len(found) == 5
    np.testing.assert_allclose([one.flops for one in found], FLOPS, rtol=0.02)


def test_sizes_that_are_nearly_the_same_are_no_budget() -> None:
    assert budgets(points(width=1.3)) == []
