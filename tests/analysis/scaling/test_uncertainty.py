"""Intervals of a law's constants, and the back-test on the largest models."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.analysis.scaling.law import Fit, ScalingLaw, fit, objective_of
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.uncertainty import Sampled, back_test, bootstrap

LAW = ScalingLaw(1.7, 400.0, 1500.0, 0.34, 0.36)


def grid(noise: float, seed: int = 0) -> Points:
    n, d = (x.ravel() for x in np.meshgrid(np.geomspace(5e7, 1e10, 7), np.geomspace(1e9, 4e11, 6)))
    return Points(n, d, LAW.loss(n, d) * np.exp(noise * np.random.default_rng(seed).normal(size=len(n))))


pytestmark = pytest.mark.usefixtures("few_starts_in_module")


@pytest.fixture(scope="module")
def fitted(few_starts_in_module: None) -> Fit:
    return fit(grid(2e-3))


@pytest.fixture(scope="module")
def sampled(fitted: Fit) -> Sampled:
    return bootstrap(fitted, 120, seed=1)


def test_a_seed_draws_the_same_and_draws_differ(fitted: Fit, sampled: Sampled) -> None:
    again, other = (bootstrap(fitted, 10, seed) for seed in (1, 2))
    assert list(again.laws) == list(sampled.laws[:10])
    assert list(other.laws) != list(again.laws)
    assert len(set(sampled.laws)) == 120


def test_intervals_are_about_as_wide_as_other_noise_makes_the_constants(sampled: Sampled) -> None:
    """Sixteen experiments with noise of their own, against the draws of one."""
    experiments = [fit(grid(2e-3, seed)).law for seed in range(16)]
    for name in ("E", "alpha", "beta"):
        low, high = sampled.interval(name)
        spread = np.std([getattr(law, name) for law in experiments], ddof=1)
        assert 0.5 < (high - low) / (3.92 * spread) < 2.0, name
        assert abs((low + high) / 2 - getattr(LAW, name)) < high - low, name  # twice what one in twenty is beyond


def test_the_objective_has_an_interval_of_its_own_draws(fitted: Fit, sampled: Sampled) -> None:
    low, high = sampled.interval("objective")
    assert low < objective_of(fitted.law, grid(2e-3)) < high


def test_the_band_is_that_of_the_laws(sampled: Sampled) -> None:
    low, high = sampled.band(np.array([1e9, 1e11]), np.array([2e10, 1e12]))
    losses = np.array([[law.loss(1e9, 2e10), law.loss(1e11, 1e12)] for law in sampled.laws])
    np.testing.assert_allclose([low, high], np.percentile(losses, [2.5, 97.5], axis=0))
    relative = (high - low) / low
    assert relative[1] > 2 * relative[0]  # beyond the points


def test_the_largest_models_are_foretold_by_the_others() -> None:
    points = grid(0.0)
    tested = back_test(points)
    assert tested is not None
    assert len(tested.held_out) == 6  # all of the largest size, though a tenth is four
    assert tested.held_out.params.min() == points.params.max()
    assert np.abs(tested.errors).max() < 1e-5
    points.losses[points.params == points.params.max()] *= 1.02
    shifted = back_test(points)
    assert shifted is not None
    np.testing.assert_allclose(shifted.errors, 1 / 1.02 - 1, rtol=1e-3)


def test_too_few_models_for_a_back_test() -> None:
    points = grid(0.0)
    assert back_test(points.take(points.params >= np.unique(points.params)[-2])) is None


def test_draws_that_no_law_fits_are_passed_over() -> None:
    """Of five points only draws of all of them say something, and none may be among a few."""
    few = fit(grid(0.0).take(np.array([0, 8, 16, 24, 32, 40])))
    assert 0 < len(bootstrap(few, 20, seed=3).laws) < 20
    sampled = bootstrap(fit(few.points.take(np.arange(5))), 3, seed=3)
    assert not sampled.laws
    assert np.isnan(sampled.interval("E")).all()
    assert np.isnan(sampled.band(np.array([1e9]), np.array([2e10]))).all()
