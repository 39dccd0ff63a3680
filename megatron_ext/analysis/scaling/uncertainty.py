"""Uncertainty of a law: intervals of its constants and losses, and a back-test on the largest models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.analysis.scaling.law import NUM_CONSTANTS, Fit, ScalingLaw, fit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.profile import Region, confidence_region
from megatron_ext.analysis.scaling.unidentifiable import Undetermined, undetermined_names, unidentifiable
from megatron_ext.utils.errors import UserError

HELD_OUT_FRACTION = 0.1
"""Fraction of the points that a back-test holds out. The points of the largest models are held out."""

PARAMS_EXPONENT, TOKENS_EXPONENT = "params_exponent", "tokens_exponent"
"""Exponents a and b of the optimal numbers of parameters and tokens over compute: N ~ C^a, D ~ C^b, a + b = 1."""

NO_FREEDOM = (
    f"{NUM_CONSTANTS} points for {NUM_CONSTANTS} constants leave no residual to estimate the noise: no intervals"
)


@dataclass(frozen=True)
class Uncertainty:
    """95 % profile-likelihood intervals of a law; see `confidence_region`.

    The intervals cover the noise of the points about the law, from each model's seed, batches and evaluated text. The
    noise is assumed independent, normal in the log loss, and of equal variance. The intervals do not cover an error in
    the form of the law.

    Attributes:
        fitted: the law and its points.
        region: confidence region of laws; None if there are not more points than constants.
        unidentifiable: constants without intervals, because the points do not determine them even without noise.
    """

    fitted: Fit
    region: Region | None
    unidentifiable: Sequence[Undetermined] = ()

    @property
    def is_band_known(self) -> bool:
        """True if the law's losses have intervals."""
        return self.region is not None and not self.unidentifiable

    @property
    def noise(self) -> float | None:
        """Estimated relative scatter of losses about the law; None if there are not more points than constants."""
        return None if self.region is None else self.region.noise

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of a constant, of `PARAMS_EXPONENT` or of `TOKENS_EXPONENT`.

        The ends are NaN if the interval is unknown, and infinite on a side that the points do not bound. The law
        is fitted with the Huber loss, but the interval is based on a least-squares fit. An interval that does not
        contain the estimate is extended to the estimate.
        """
        if name in (PARAMS_EXPONENT, TOKENS_EXPONENT):
            return self._exponent_interval(name)
        if self.region is None or name in undetermined_names(self.unidentifiable):
            return math.nan, math.nan
        region = self.region
        interval = {
            "E": region.irreducible_loss,
            "A": lambda: region.factor(0),
            "B": lambda: region.factor(1),
            "alpha": lambda: region.exponent(0),
            "beta": lambda: region.exponent(1),
        }[name]()
        return _extend(interval, float(getattr(self.fitted.law, name)))

    def _exponent_interval(self, name: str) -> tuple[float, float]:
        law = self.fitted.law
        if (
            self.region is None
            or not law.is_decreasing
            or {"alpha", "beta"} & set(undetermined_names(self.unidentifiable))
        ):
            return math.nan, math.nan
        low, high = _extend(self.region.params_exponent(), law.params_exponent)
        return (low, high) if name == PARAMS_EXPONENT else (1 - high, 1 - low)

    def band(self, params: FloatArray, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the 95 % interval of the law's loss for each model, without the noise of a single run about the law.

        The ends are NaN if a constant has no interval.
        """
        if self.region is None or self.unidentifiable:
            return np.full_like(params, math.nan), np.full_like(params, math.nan)
        low, high = self.region.band(params, tokens)
        loss = self.fitted.law.loss(params, tokens)
        return np.minimum(low, loss), np.maximum(high, loss)


def _extend(interval: tuple[float, float], value: float) -> tuple[float, float]:
    return min(interval[0], value), max(interval[1], value)


def compute_uncertainty(fitted: Fit) -> Uncertainty:
    """Compute the intervals of a fitted law."""
    return Uncertainty(fitted, confidence_region(fitted), unidentifiable(fitted))


@dataclass(frozen=True)
class BackTest:
    """Predictions of the largest models by a law of the smaller ones.

    Attributes:
        law: law of the smaller models.
        held_out: the largest models.
        errors: float64 [n], relative errors of the predicted losses: predicted / measured - 1.
    """

    law: ScalingLaw
    held_out: Points
    errors: FloatArray


def back_test(points: Points) -> BackTest | None:
    """Fit a law without the largest tenth of the models, and predict their losses.

    At least one model is held out. Models as large as the smallest held-out model are held out, too.

    Returns:
        None if a law cannot be fitted to the remaining models.
    """
    min_params = np.sort(points.params)[-max(1, int(HELD_OUT_FRACTION * len(points)))]
    is_large = points.params >= min_params * (1 - 1e-6)
    try:
        law = fit(points.take(~is_large)).law
    except UserError:
        return None
    held_out = points.take(is_large)
    errors = law.loss(held_out.params, held_out.tokens) / held_out.losses - 1
    return BackTest(law, held_out, errors)
