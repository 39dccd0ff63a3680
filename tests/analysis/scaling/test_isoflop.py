"""IsoFLOP parabolas, compared with the law that generated the points."""

from __future__ import annotations

import numpy as np
import pytest
import scipy  # its parts are imported at first use, not in each worker

from megatron_ext.analysis.scaling.isoflop import Budget, best_sizes, budgets
from megatron_ext.analysis.scaling.law import ScalingLaw
from megatron_ext.analysis.scaling.points import Points

LAW = ScalingLaw(1.7, 400.0, 400.0, 0.35, 0.35)
"""A law whose loss is symmetric in the logarithm of size around its minimum, so that a parabola finds the minimum."""

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
    dice, models = np.random.default_rng(2), points()
    jitter = np.exp(dice.uniform(-0.03, 0.03, len(models)))
    shuffled = Points(models.params, models.tokens * jitter, models.losses).take(dice.permutation(len(models)))
    assert [len(one.points) for one in budgets(shuffled)] == [9] * 5


def test_too_few_sizes_are_no_budget() -> None:
    assert budgets(points(sizes=3)) == []
    assert best_sizes([]) is None


def test_a_lowest_place_beyond_the_sizes_is_none() -> None:
    models = points()
    rising = models.take(models.params >= np.repeat(LAW.best_params(FLOPS), 9) * 1.2)
    assert {one.best_params for one in budgets(rising)} == {None}
    assert best_sizes(budgets(rising)) is None


def test_other_points_between_the_budgets_do_not_join_them() -> None:
    models, dice = points(), np.random.default_rng(4)
    n, d = (np.exp(dice.uniform(*np.log(bounds), 12)) for bounds in ((1e8, 1e10), (1e9, 1e11)))
    both = Points(
        *(np.concatenate(pair) for pair in ((models.params, n), (models.tokens, d), (models.losses, LAW.loss(n, d))))
    )
    found = budgets(both)
    assert len(found) == 5
    np.testing.assert_allclose([one.flops for one in found], FLOPS, rtol=0.02)


def test_sizes_that_are_nearly_the_same_are_no_budget() -> None:
    assert budgets(points(width=1.3)) == []


@pytest.mark.parametrize("ratio", [1.03, 1.06, 1.11])
def test_budgets_a_little_apart_are_two(ratio: float) -> None:
    """Budgets within 12 % of each other used to be merged."""
    compute = np.array([1e19, ratio * 1e19])
    n = np.concatenate([LAW.best_params(c) * np.geomspace(1 / 3, 3, 6) for c in compute])
    d = np.repeat(compute, 6) / 6 / n
    found = budgets(Points(n, d, LAW.loss(n, d)))
    np.testing.assert_allclose([one.flops for one in found], compute)
    np.testing.assert_allclose([one.best_params for one in found], LAW.best_params(compute), rtol=1e-5)
    assert [one.doubt for one in found] == ["", ""]


def test_budgets_that_overlap_are_one_with_a_doubt() -> None:
    """Two budgets 4 % apart with the same sizes. Rounding tokens by up to 3 % makes their ranges of compute overlap."""
    dice, sizes = np.random.default_rng(1), LAW.best_params(1e19) * np.geomspace(1 / 3, 3, 6)
    n = np.tile(sizes, 2)
    d = np.repeat([1e19, 1.04e19], 6) / 6 / n * np.exp(dice.uniform(-0.03, 0.03, 12))
    (one,) = budgets(Points(n, d, LAW.loss(n, d)))
    assert "of its 6 sizes occur more than once" in one.doubt
    (single,) = budgets(Points(n[:6], d[:6], LAW.loss(n, d)[:6]))
    assert single.doubt == ""


def test_the_lowest_place_has_the_interval_that_its_slope_says() -> None:
    """Fieller's interval ends where a t-test of the slope, in another parametrisation of the parabola, has p = 0.05."""
    dice, models = np.random.default_rng(3), points(sizes=7)
    noisy = Points(models.params, models.tokens, models.losses * np.exp(0.002 * dice.normal(size=len(models))))
    for one in budgets(noisy):
        assert one.best_interval is not None
        assert one.best_params is not None
        assert one.best_interval[0] < one.best_params < one.best_interval[1]
        for end in one.best_interval:
            x = np.log(one.points.params / end)  # the coefficient of x is the slope at the interval's end
            design = np.stack([np.ones_like(x), x, x**2], axis=1)
            solved, squares, *_ = np.linalg.lstsq(design, one.points.losses, rcond=None)
            error = np.sqrt(squares[0] / 4 * np.linalg.inv(design.T @ design)[1, 1])
            assert abs(solved[1] / error) == pytest.approx(scipy.stats.t.ppf(0.975, 4), rel=1e-6)


def test_losses_that_are_all_noise_bound_no_lowest_place() -> None:
    dice, models = np.random.default_rng(3), points(sizes=5)
    noisy = Points(models.params, models.tokens, models.losses * np.exp(0.05 * dice.normal(size=len(models))))
    assert any(one.best_params is not None for one in budgets(noisy))
    assert {one.best_interval for one in budgets(noisy)} == {None}


def test_the_exponent_has_an_interval_from_three_budgets_on() -> None:
    found = [Budget(c, points(), np.zeros(3), p) for c, p in ((1e19, 1e8), (1e20, 3.3e8), (1e21, 9.5e8))]
    two, three = best_sizes(found[:2]), best_sizes(found)
    assert two is not None
    assert three is not None
    assert two.exponent_interval is None
    line = scipy.stats.linregress(np.log([1e19, 1e20, 1e21]), np.log([1e8, 3.3e8, 9.5e8]))
    half = scipy.stats.t.ppf(0.975, 1) * line.stderr
    assert three.exponent == pytest.approx(line.slope)
    assert three.exponent_interval == pytest.approx((line.slope - half, line.slope + half))
