"""Interpolation between evaluations, against SciPy, numerical derivatives and the variance of known noise."""

import numpy as np
import pytest
import scipy  # its parts are imported at first use, not in each worker

from megatron_ext.analysis.interpolation import (
    left_out_residuals,
    local_slope,
    monotone_weights,
    neighbouring_residuals,
)


@pytest.mark.parametrize("is_monotone", [True, False])
@pytest.mark.parametrize("number", [2, 3, 9])
def test_weights_give_the_values_of_scipy(number, is_monotone):
    generator = np.random.default_rng(number)
    x, y = generator.normal(size=number), generator.normal(size=number)
    order = np.argsort(x)
    if is_monotone:
        y[order] = np.sort(y)
    at = np.linspace(x.min(), x.max(), 23)
    expected = (
        scipy.interpolate.PchipInterpolator(x[order], y[order])(at) if number > 2 else np.interp(at, x[order], y[order])
    )
    weights = monotone_weights(x, y, at)
    np.testing.assert_allclose(weights @ y, expected, atol=1e-12)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-12)


def test_weights_are_derivatives():
    generator = np.random.default_rng(0)
    x, y = np.sort(generator.normal(size=7)), np.sort(generator.normal(size=7))
    at, step = np.linspace(x[0], x[-1], 11), 1e-6
    for index in range(7):
        moved = y + step * (np.arange(7) == index)
        slope = (
            scipy.interpolate.PchipInterpolator(x, moved)(at) - scipy.interpolate.PchipInterpolator(x, y)(at)
        ) / step
        np.testing.assert_allclose(monotone_weights(x, y, at)[:, index], slope, atol=1e-4)


def test_no_extrapolation():
    x = np.array([5.0, 3.0, 4.0])
    weights = monotone_weights(x, x, np.array([5.0001, 4.0, 2.9999]))
    assert np.isnan(weights).all(axis=1).tolist() == [True, False, True]


def test_points_of_equal_training_loss_are_averaged():
    x = np.array([4.0, 3.0, 4.0])
    weights = monotone_weights(x, np.array([1.0, 0.0, 3.0]), np.array([4.0, 3.5, 3.0]))
    np.testing.assert_allclose(weights, [[0.5, 0, 0.5], [0.25, 0.5, 0.25], [0, 1, 0]])


def test_local_slope():
    x = np.linspace(3.0, 6.0, 31)
    np.testing.assert_allclose(local_slope(x, x**2 - x, np.array([4.5])), [8.0], atol=1e-9)
    np.testing.assert_array_equal(local_slope(x[:1], x[:1], x[:1]), [0.0])


def test_left_out_residuals_have_the_variance_of_the_noise():
    """A straight line with independent noise of 0.1; the ends have no residual."""
    generator = np.random.default_rng(0)
    x = np.linspace(6.0, 3.0, 40)
    found = np.array([left_out_residuals(x, 2 * x + 0.1 * generator.standard_normal(40)) for _ in range(30)])
    assert np.isnan(found[:, [0, -1]]).all()
    assert np.sqrt((found[:, 1:-1] ** 2).mean()) == pytest.approx(0.1, rel=0.1)


def test_neighbouring_residuals_are_the_nearest_in_time():
    residuals = np.array([np.nan, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, np.nan])
    near = neighbouring_residuals(residuals)
    assert near.shape == (8, 5)
    assert sorted(near[0]) == [1, 2, 3, 4, 5]
    assert sorted(near[7]) == [2, 3, 4, 5, 6]
