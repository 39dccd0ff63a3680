"""Robust residuals of a law, with limited influence of outliers (Huber 1981, Robust Statistics, chapter 7).

`law.DELTA` limits the influence of a point at a fixed 0.1 % of its loss. If losses scatter more than that, the fit is
nearly one of least absolute values, for which there is no good estimate of the uncertainty from few points. Intervals
are therefore based on a second fit, whose threshold is 1.345 standard deviations of the scatter. Threshold and scatter
are estimated together (Huber's proposal 2). For normal noise this second fit has 95 % of the efficiency of least
squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.analysis.scaling.law import NUM_CONSTANTS, Fit, ScalingLaw, refit

CLIP_THRESHOLD = 1.345
"""Threshold in standard deviations of the scatter. Larger residuals are clipped to the threshold."""

CLIPPED_VARIANCE = 0.71016
"""Mean square of a standard normal variable that is clipped to +-`CLIP_THRESHOLD`."""

MIN_NOISE = 1e-8
"""Minimum standard deviation of log losses. Smaller scatter consists of rounding errors."""

MAX_ITERATIONS, TOLERANCE = 10, 0.02
"""Maximum iterations of fit and scatter estimate, and the relative change of the scatter at which they stop."""


@dataclass(frozen=True)
class RobustFit:
    """Robust fit for intervals.

    Attributes:
        law: law of the second fit; equal to the fitted law for points without noise.
        residuals: float64 [n], residuals of log losses as pseudo-observations. They are clipped, and scaled so that a
            least-squares fit to them has the variance of the robust fit.
    """

    law: ScalingLaw
    residuals: FloatArray


def fit_robust(fitted: Fit) -> RobustFit:
    """Compute the robust fit, starting at a fitted law. There must be more points than constants."""
    points, law, degrees_of_freedom = fitted.points, fitted.law, len(fitted.points) - NUM_CONSTANTS
    residuals = _residuals(fitted, law)
    noise = max(math.sqrt(float(residuals @ residuals) / degrees_of_freedom), MIN_NOISE)
    for _ in range(MAX_ITERATIONS):
        law = refit(points, law, CLIP_THRESHOLD * noise)
        residuals = _residuals(fitted, law)
        clipped = np.clip(residuals, -CLIP_THRESHOLD * noise, CLIP_THRESHOLD * noise)
        variance = float(clipped @ clipped) / (degrees_of_freedom * CLIPPED_VARIANCE)
        previous, noise = noise, max(math.sqrt(variance), MIN_NOISE)
        if abs(noise / previous - 1) < TOLERANCE:
            break
    clipped = np.clip(residuals, -CLIP_THRESHOLD * noise, CLIP_THRESHOLD * noise)
    unclipped = max(float((np.abs(residuals) < CLIP_THRESHOLD * noise).mean()), 1 / len(residuals))
    # Huber's correction of the variance for few points, K in his equation 7.6.
    correction = 1 + NUM_CONSTANTS / len(residuals) * (1 - unclipped) / unclipped
    return RobustFit(law, clipped * correction / unclipped)


def _residuals(fitted: Fit, law: ScalingLaw) -> FloatArray:
    return np.log(fitted.points.losses / law.loss(fitted.points.params, fitted.points.tokens))
