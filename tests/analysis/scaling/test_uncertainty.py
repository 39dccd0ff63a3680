"""Confidence intervals of a law's constants, and the back-test on the largest models."""

from __future__ import annotations

import numpy as np
import pytest
import scipy  # its parts are imported at first use, not in each worker

from megatron_ext.analysis.scaling import robust
from megatron_ext.analysis.scaling.law import Fit, ScalingLaw, fit, refit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.uncertainty import (
    PARAMS_EXPONENT,
    TOKENS_EXPONENT,
    Uncertainty,
    back_test,
    compute_uncertainty,
)

LAW = ScalingLaw(1.7, 400.0, 1500.0, 0.34, 0.36)


def grid(noise: float, seed: int = 0) -> Points:
    n, d = (x.ravel() for x in np.meshgrid(np.geomspace(5e7, 1e10, 7), np.geomspace(1e9, 4e11, 6)))
    return Points(n, d, LAW.loss(n, d) * np.exp(noise * np.random.default_rng(seed).normal(size=len(n))))


pytestmark = pytest.mark.usefixtures("few_starts_in_module")


@pytest.fixture(scope="module")
def fitted(few_starts_in_module: None) -> Fit:
    return fit(grid(2e-3))


@pytest.fixture(scope="module")
def uncertainty(fitted: Fit) -> Uncertainty:
    return compute_uncertainty(fitted)


def test_intervals_are_about_as_wide_as_other_noise_makes_the_constants(uncertainty: Uncertainty) -> None:
    """Compare one experiment's interval with the spread of sixteen experiments with independent noise."""
    experiments = [refit(grid(2e-3, seed), LAW) for seed in range(16)]
    for name in ("E", "alpha", "beta"):
        low, high = uncertainty.interval(name)
        spread = np.std([getattr(law, name) for law in experiments], ddof=1)
        assert 0.5 < (high - low) / (3.92 * spread) < 2.0, name
        assert abs((low + high) / 2 - getattr(LAW, name)) < high - low, name  # twice the half-width of a 95 % interval
    assert uncertainty.noise == pytest.approx(2e-3, rel=0.3)


def smallest_rest(points: Points, name: str, value: float, near: ScalingLaw) -> float:
    """Return the least sum of squared log-loss residuals with one constant fixed, by an independent optimizer."""
    names = ("E", "A", "B", "alpha", "beta")
    held = names.index(name)
    start = np.array([np.log(near.E), np.log(near.A), np.log(near.B), near.alpha, near.beta])
    start[held] = np.log(value) if held < 3 else value

    def rest(free: np.ndarray) -> np.ndarray:
        at = np.insert(free, held, start[held])
        law = ScalingLaw(*np.exp(at[:3]), *at[3:])
        return np.log(points.losses / law.loss(points.params, points.tokens))

    found = scipy.optimize.least_squares(
        rest, np.delete(start, held), x_scale="jac", xtol=1e-14, ftol=1e-14, gtol=1e-14
    )
    return 2 * float(found.cost)


@pytest.mark.parametrize("name", ["E", "A", "B", "alpha", "beta"])
def test_an_interval_ends_where_the_sum_of_squares_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-test by brute force: with the constant fixed at an end of its interval, p = 0.05."""
    monkeypatch.setattr(robust, "CLIP_THRESHOLD", 100.0)  # ordinary least squares
    monkeypatch.setattr(robust, "CLIPPED_VARIANCE", 1.0)
    points = grid(2e-3)
    fitted = Fit(refit(points, LAW), 0.0, points)
    ends, freedom = compute_uncertainty(fitted).interval(name), len(points) - 5
    law = refit(points, fitted.law, 1.0)
    least = float((np.log(points.losses / law.loss(points.params, points.tokens)) ** 2).sum())
    for end in ends:
        ratio = (smallest_rest(points, name, end, fitted.law) / least - 1) * freedom
        assert float(scipy.stats.f.sf(ratio, 1, freedom)) == pytest.approx(0.05, abs=0.006), end


def test_the_exponent_of_tokens_has_the_rest_of_that_of_parameters(uncertainty: Uncertainty) -> None:
    low, high = uncertainty.interval(PARAMS_EXPONENT)
    assert low < LAW.params_exponent < high
    assert uncertainty.interval(TOKENS_EXPONENT) == pytest.approx((1 - high, 1 - low))


def test_the_band_widens_beyond_the_points(uncertainty: Uncertainty) -> None:
    params, tokens = np.array([1e9, 1e11]), np.array([2e10, 1e12])
    low, high = uncertainty.band(params, tokens)
    assert (low < LAW.loss(params, tokens)).all()
    assert (LAW.loss(params, tokens) < high).all()
    relative = (high - low) / low
    assert relative[1] > 2 * relative[0]


def test_points_far_off_the_law_widen_intervals_little(uncertainty: Uncertainty) -> None:
    points = grid(2e-3)
    points.losses[[5, 20]] *= 1.05
    far = compute_uncertainty(Fit(refit(points, LAW), 0.0, points))
    for name in ("E", "alpha", "beta"):
        (low, high), (low_far, high_far) = uncertainty.interval(name), far.interval(name)
        assert high_far - low_far < 1.6 * (high - low)  # although the standard deviation is seven times as large
        assert abs((low_far + high_far) / 2 - getattr(LAW, name)) < high_far - low_far


def test_five_points_have_no_intervals() -> None:
    few = Fit(LAW, 0.0, grid(0.0).take(np.array([0, 8, 16, 24, 32])))
    uncertainty = compute_uncertainty(few)
    assert uncertainty.region is None
    assert uncertainty.noise is None
    assert np.isnan([uncertainty.interval(name) for name in ("E", "A", "B", "alpha", "beta", PARAMS_EXPONENT)]).all()
    assert np.isnan(uncertainty.band(np.array([1e9]), np.array([2e10]))).all()


def test_points_without_noise_have_narrow_intervals() -> None:
    uncertainty = compute_uncertainty(Fit(LAW, 0.0, grid(0.0)))
    for name in ("E", "alpha", "beta"):
        assert uncertainty.interval(name) == pytest.approx((getattr(LAW, name),) * 2, rel=1e-4)


def test_six_noisy_points_do_not_bound_all_constants() -> None:
    points = grid(2e-2, 5).take(np.array([0, 9, 16, 23, 33, 41]))
    uncertainty = compute_uncertainty(Fit(refit(points, LAW), 0.0, points))
    assert uncertainty.interval("alpha")[1] == np.inf
    assert uncertainty.interval("A")[1] == np.inf
    assert np.isfinite(uncertainty.interval("E")).all()  # bounded by 0 and the lowest losses


def test_the_largest_models_are_foretold_by_the_others() -> None:
    points = grid(0.0)
    tested = back_test(points)
    assert tested is not None
    assert len(tested.held_out) == 6  # all points of the largest size, although a tenth is four
    assert tested.held_out.params.min() == points.params.max()
    assert np.abs(tested.errors).max() < 1e-5
    points.losses[points.params == points.params.max()] *= 1.02
    shifted = back_test(points)
    assert shifted is not None
    np.testing.assert_allclose(shifted.errors, 1 / 1.02 - 1, rtol=1e-3)


def test_too_few_models_for_a_back_test() -> None:
    points = grid(0.0)
    assert back_test(points.take(points.params >= np.unique(points.params)[-2])) is None


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 60.0), (20.0, 2.0), (60.0, 2.0)])
def test_a_fit_that_runs_away_leaves_a_law_of_numbers(alpha: float, beta: float) -> None:
    """Six tiny models that no law fits. From these starts, a fit makes an exponent so steep that A or B overflows."""
    params = np.array([155968.0, 155968.0, 57504.0, 57504.0, 20560.0, 20560.0])
    losses = np.array([3.1424628496, 3.4766229391, 3.3771691912, 3.9906828403, 3.5197301507, 4.7476477623])
    points = Points(params, np.array([23040.0, 7680.0] * 3), losses)
    middle_n, middle_d = (np.exp(np.log(x).mean()) for x in (points.params, points.tokens))
    law = refit(points, ScalingLaw(2.5, 0.5 * middle_n**alpha, 0.5 * middle_d**beta, alpha, beta))
    assert np.isfinite([law.E, law.A, law.B, law.alpha, law.beta]).all()
    assert np.isfinite(law.loss(points.params, points.tokens)).all()
