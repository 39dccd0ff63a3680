"""Power law of test loss over training loss for each mixer, and tests of the difference of two mixers.

L_test = factor * L_train^exponent is a line in logarithms. It is fitted by least squares, with the tests of linear
regression (Draper & Smith 1998, chapter 1). Each point consists of the final losses of a trained model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import fdtrc, stdtrit  # scipy.stats takes half a second to import

from megatron_ext.analysis.run_files import FloatArray

MIN_MODELS = 3
"""Minimum number of models of a mixer; two points always lie on a line."""

CONFIDENCE = 0.95

MIN_VARIANCE = 1e-28
"""Variance of log losses below which there are only rounding errors."""


@dataclass(frozen=True)
class Line:
    """Line of log test loss over log training loss of one mixer's models.

    Attributes:
        exponent: slope of the line.
        exponent_interval: 95 % interval of the slope.
        log_factor: value of the line at a training loss of 1 nat.
        deviation: standard deviation of the residuals, relative to the loss.
        log_train: float64 [n], logarithms of training losses.
        residuals: float64 [n], logarithms of test losses minus the line.
    """

    exponent: float
    exponent_interval: tuple[float, float]
    log_factor: float
    deviation: float
    log_train: FloatArray
    residuals: FloatArray

    @property
    def factor(self) -> float:
        """Test loss at a training loss of 1 nat by the line."""
        return float(np.exp(self.log_factor))

    @property
    def log_test(self) -> FloatArray:
        """Logarithms of test losses, float64 [n]."""
        return self.at(self.log_train) + self.residuals

    @property
    def degrees_of_freedom(self) -> int:
        """Degrees of freedom of the residuals."""
        return len(self.residuals) - 2

    def at(self, log_train: FloatArray | float) -> FloatArray:
        """Return the logarithms of test losses by the line at logarithms of training losses."""
        return np.asarray(self.log_factor + self.exponent * np.asarray(log_train))

    def uncertainty(self, log_train: FloatArray | float) -> FloatArray:
        """Return the variance of the line at log training losses, relative to the variance of a residual."""
        centred = self.log_train - self.log_train.mean()
        distance = np.asarray(log_train) - self.log_train.mean()
        return np.asarray(1 / len(centred) + distance**2 / float(centred @ centred))

    def covariance(self, origin: float) -> FloatArray:
        """Return the covariance of the line's value at log training loss `origin` and its slope, float64 [2, 2]."""
        x = self.log_train - origin
        design = np.stack([np.ones_like(x), x], axis=1)
        return np.asarray(max(self.deviation**2, MIN_VARIANCE) * np.linalg.inv(design.T @ design))

    def half_width(self, log_train: FloatArray | float) -> FloatArray:
        """Return the half width of the line's 95 % interval at log training losses, in logarithms."""
        t = float(stdtrit(self.degrees_of_freedom, (1 + CONFIDENCE) / 2))
        return np.asarray(t * self.deviation * np.sqrt(self.uncertainty(log_train)))


@dataclass(frozen=True)
class Difference:
    """Difference of two mixers' lines.

    Attributes:
        p_value: p-value of the null hypothesis that both mixers have the same line (Wald test of two constants, with a
            separate scatter for each mixer).
        train_loss: middle of the training losses that both mixers cover (geometric mean of the ends); None: their
            ranges do not overlap.
        ratio: test loss of the second mixer over that of the first at `train_loss`; None if `train_loss` is None.
        interval: 95 % interval of the ratio; None if `train_loss` is None.
    """

    p_value: float
    train_loss: float | None
    ratio: float | None
    interval: tuple[float, float] | None


def fit_line(train: FloatArray, test: FloatArray) -> Line | None:
    """Fit the line of a mixer's models.

    Args:
        train: float64 [n], training losses in nats per token.
        test: float64 [n], test losses in nats per token.

    Returns:
        None for fewer than three models, or if all have the same training loss.
    """
    x, y = np.log(train), np.log(test)
    if len(x) < MIN_MODELS or np.ptp(x) < 1e-9:
        return None
    centred = x - x.mean()
    exponent = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - exponent * centred
    deviation = float(np.sqrt(residuals @ residuals / (len(x) - 2)))
    half_width = float(stdtrit(len(x) - 2, (1 + CONFIDENCE) / 2)) * deviation / float(np.sqrt(centred @ centred))
    log_factor = float(y.mean() - exponent * x.mean())
    return Line(exponent, (exponent - half_width, exponent + half_width), log_factor, deviation, x, residuals)


def difference(first: Line, second: Line) -> Difference:
    """Test if two lines are equal, and estimate the ratio of test losses in the middle of the common range.

    Each mixer has a separate scatter, so the degrees of freedom are approximate. They follow Welch (1947) for the
    ratio, and Krishnamoorthy & Yu (2004, Statistics & Probability Letters 66) for the test of both constants.
    """
    p_value = _p_value(first, second)
    low = max(first.log_train.min(), second.log_train.min())
    high = min(first.log_train.max(), second.log_train.max())
    if low > high:
        return Difference(p_value, None, None, None)
    middle = float(low + high) / 2
    log_ratio = float(second.at(middle) - first.at(middle))
    variances = [max(line.deviation**2, MIN_VARIANCE) * float(line.uncertainty(middle)) for line in (first, second)]
    degrees_of_freedom = sum(variances) ** 2 / sum(
        v**2 / line.degrees_of_freedom for v, line in zip(variances, (first, second), strict=True)
    )
    half_width = float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) * np.sqrt(sum(variances))
    ratio, low_ratio, high_ratio = (
        float(np.exp(x)) for x in (log_ratio, log_ratio - half_width, log_ratio + half_width)
    )
    return Difference(p_value, float(np.exp(middle)), ratio, (low_ratio, high_ratio))


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values of a family of tests, so that any of them is wrongly below 0.05 in at most 5 % of families.

    The adjustment is Holm's (1979, Scandinavian Journal of Statistics 6), which holds for tests that depend on each
    other.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _p_value(first: Line, second: Line) -> float:
    """Return the p-value of the null hypothesis that both lines have the same two constants."""
    lines = (first, second)
    if _common_line_squares(lines) <= MIN_VARIANCE * sum(len(line.residuals) for line in lines):
        return 1.0  # no noise, and all points on one line
    origin = float(np.mean([line.log_train.mean() for line in lines]))
    difference = np.array([second.at(origin) - first.at(origin), second.exponent - first.exponent])
    covariances = [line.covariance(origin) for line in lines]
    inverse = np.linalg.inv(sum(covariances))
    constants, spread = len(difference), 0.0
    for line, covariance in zip(lines, covariances, strict=True):
        weight = covariance @ inverse
        spread += (np.trace(weight @ weight) + np.trace(weight) ** 2) / line.degrees_of_freedom
    degrees_of_freedom = constants * (constants + 1) / spread
    denominator_freedom = degrees_of_freedom - constants + 1
    if denominator_freedom <= 0:
        return 1.0  # nearly all scatter is from three models, too few to estimate it
    statistic = float(difference @ inverse @ difference) * denominator_freedom / (degrees_of_freedom * constants)
    return float(fdtrc(constants, denominator_freedom, statistic))


def _common_line_squares(lines: Sequence[Line]) -> float:
    """Return the residual sum of squares of one line through all points."""
    x = np.concatenate([line.log_train for line in lines])
    y = np.concatenate([line.log_test for line in lines])
    centred = x - x.mean()
    residuals = y - y.mean() - (centred @ y / (centred @ centred)) * centred
    return float(residuals @ residuals)
