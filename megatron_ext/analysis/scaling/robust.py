"""Residuals of a law that single points far off it do not govern (Huber 1981, Robust Statistics, chapter 7).

`law.DELTA` bounds what a point counts at a fixed 0.1 % of its loss. Where losses scatter by more than that, the fit is
nearly one of least absolute values, for which no good estimate of its uncertainty is known from few points. Intervals
are therefore about a fit whose bound follows the scatter: 1.345 standard deviations, found together with the scatter
(Huber's proposal 2), which loses 5 % of the efficiency of least squares for normal noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.runs import FloatArray
from megatron_ext.analysis.scaling.law import FEWEST_POINTS, Fit, ScalingLaw, refit

BOUND = 1.345
"""Standard deviations from which on a residual counts no more than one of this size."""

EXPECTED = 0.71016
"""Mean square of a standard normal variable that is clipped to +-`BOUND`."""

SMALLEST_NOISE = 1e-8
"""Standard deviation of log losses below which there is only rounding."""

ROUNDS, SETTLED = 10, 0.02
"""Rounds of fits and scatters at most, and the relative change of the scatter that ends them."""


@dataclass(frozen=True)
class Robust:
    """A robust fit for intervals.

    Attributes:
        law: near the one that was fitted, and the same for points without noise.
        rest: float64 [n], residuals of log losses as pseudo-observations: clipped, and enlarged so that the least
            squares about the law with them has the variance of the robust fit.
    """

    law: ScalingLaw
    rest: FloatArray


def robust(fitted: Fit) -> Robust:
    """The robust fit to more points than there are constants, from the law that was fitted to them."""
    points, law, freedom = fitted.points, fitted.law, len(fitted.points) - FEWEST_POINTS
    rest = _residuals(fitted, law)
    noise = max(math.sqrt(float(rest @ rest) / freedom), SMALLEST_NOISE)
    for _ in range(ROUNDS):
        law = refit(points, law, BOUND * noise)
        rest = _residuals(fitted, law)
        clipped = np.clip(rest, -BOUND * noise, BOUND * noise)
        before, noise = noise, max(math.sqrt(float(clipped @ clipped) / (freedom * EXPECTED)), SMALLEST_NOISE)
        if abs(noise / before - 1) < SETTLED:
            break
    clipped = np.clip(rest, -BOUND * noise, BOUND * noise)
    free = max(float((np.abs(rest) < BOUND * noise).mean()), 1 / len(rest))
    # Huber's correction of the variance for few points, K in his equation 7.6.
    correction = 1 + FEWEST_POINTS / len(rest) * (1 - free) / free
    return Robust(law, clipped * correction / free)


def _residuals(fitted: Fit, law: ScalingLaw) -> FloatArray:
    return np.log(fitted.points.losses / law.loss(fitted.points.params, fitted.points.tokens))
