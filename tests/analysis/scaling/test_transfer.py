"""Test loss as a function of training loss, compared with scipy's regression and with chance."""

from __future__ import annotations

import numpy as np
import pytest
import scipy  # its parts are imported at first use, not in each worker

from megatron_ext.analysis.scaling.transfer import Line, adjust_p_values, difference, fit_line


def random_line(seed: int, *, factor: float = 1.3, exponent: float = 0.8, noise: float = 0.01, models: int = 8) -> Line:
    dice = np.random.default_rng(seed)
    train = dice.uniform(2.0, 4.0, models)
    line = fit_line(train, factor * train**exponent * np.exp(noise * dice.normal(size=models)))
    assert line is not None
    return line


def test_the_line_is_scipys() -> None:
    line = random_line(1)
    y = line.at(line.log_train) + line.residuals
    expected = scipy.stats.linregress(line.log_train, y)
    assert (line.exponent, line.log_factor) == pytest.approx((expected.slope, expected.intercept))
    half = scipy.stats.t.ppf(0.975, 6) * expected.stderr
    assert line.exponent_interval == pytest.approx((expected.slope - half, expected.slope + half))
    at_zero = line.deviation * np.sqrt(line.uncertainty(0.0))
    assert at_zero == pytest.approx(expected.intercept_stderr)


def test_a_power_law_comes_back() -> None:
    line = random_line(2, noise=0.0)
    assert (line.factor, line.exponent) == pytest.approx((1.3, 0.8))
    assert line.deviation < 1e-12


def test_too_few_models_are_no_line() -> None:
    assert fit_line(np.array([2.0, 3.0]), np.array([2.5, 3.5])) is None
    assert fit_line(np.array([2.0, 2.0, 2.0]), np.array([2.5, 3.5, 3.0])) is None


def test_one_curve_is_called_two_as_often_as_the_p_value_says() -> None:
    """Draw 400 pairs from one law: a twentieth has a p-value below 0.05, and half have one below 0.5."""
    found = np.array([difference(random_line(2 * n), random_line(2 * n + 1)).p_value for n in range(400)])
    for level in (0.05, 0.5):
        error = np.sqrt(level * (1 - level) / 400)
        assert abs((found < level).mean() - level) < 4 * error


def test_intervals_of_the_ratio_hold_it_as_often_as_they_say() -> None:
    covered = 0
    for n in range(300):
        result = difference(random_line(2 * n), random_line(2 * n + 1, factor=1.3 * 1.02))
        assert result.interval is not None
        covered += result.interval[0] <= 1.02 <= result.interval[1]
    assert abs(covered / 300 - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 300)


def test_unequal_scatter_makes_neither_more_differences_nor_narrower_intervals() -> None:
    """An F-test with a common variance would report a difference for a fifth of these pairs."""
    found = [
        difference(random_line(2 * n, models=4, noise=0.02), random_line(2 * n + 1, models=12)) for n in range(400)
    ]
    assert np.mean([one.p_value < 0.05 for one in found]) < 0.11
    covered = [one.interval[0] <= 1 <= one.interval[1] for one in found if one.interval is not None]
    assert len(covered) > 350
    assert np.mean(covered) > 0.89


def test_many_models_are_tested_as_by_one_regression() -> None:
    """The p-value of 300 models with equal variances is that of the F distribution for two more constants."""
    one, other = random_line(3, models=300), random_line(4, models=300, factor=1.3 * 1.001)
    x, y = (np.concatenate([getattr(line, name) for line in (one, other)]) for name in ("log_train", "log_test"))
    is_other = np.repeat([0.0, 1.0], 300)
    shared = np.stack([np.ones_like(x), x], axis=1)
    own = np.column_stack([shared, is_other, is_other * x])
    separate, common = (np.linalg.lstsq(design, y, rcond=None)[1][0] for design in (own, shared))
    expected = scipy.stats.f.sf((common - separate) / 2 / (separate / 596), 2, 596)
    assert 0.01 < expected < 0.9
    assert difference(one, other).p_value == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("other", [{"factor": 1.3 * 1.06}, {"exponent": 0.6, "factor": 1.3 * 3**0.2}])
def test_curves_that_differ(other: dict[str, float]) -> None:
    """Curves that differ in height, or only in slope. The latter cross in the middle."""
    result = difference(random_line(5), random_line(6, **other))
    assert result.p_value < 1e-3
    assert result.ratio is not None
    assert (abs(result.ratio - 1) > 0.03) == ("exponent" not in other)


def test_without_noise() -> None:
    same = difference(random_line(5, noise=0.0), random_line(6, noise=0.0))
    assert same.p_value == 1.0
    assert same.ratio == pytest.approx(1.0)
    assert difference(random_line(5, noise=0.0), random_line(6, noise=0.0, factor=1.4)).p_value < 1e-9


def test_training_losses_that_no_two_mixers_share() -> None:
    low, high = (np.linspace(*ends, 5) for ends in ((2.0, 2.5), (3.0, 3.5)))
    one, other = fit_line(low, 1.1 * low), fit_line(high, 1.1 * high + 0.01 * np.sin(high * 9))
    assert one is not None
    assert other is not None
    result = difference(one, other)
    assert (result.train_loss, result.ratio, result.interval) == (None, None, None)
    assert 0 <= result.p_value <= 1


def test_adjusted_p_values() -> None:
    """The sorted values are multiplied by 4, 3, 2 and 1, and none is less than the one before it."""
    assert adjust_p_values([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_p_values([0.9, 0.8]) == [1.0, 1.0]
    assert adjust_p_values([]) == []
