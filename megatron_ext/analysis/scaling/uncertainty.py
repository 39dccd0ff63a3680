"""How sure a law is: intervals of its constants and losses, and the largest models left out and foretold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.runs import FloatArray
from megatron_ext.analysis.scaling.law import FEWEST_POINTS, Fit, ScalingLaw, fit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.profile import Region, region_of
from megatron_ext.analysis.scaling.untold import Untold, names_of, untold
from megatron_ext.errors import UserError

HELD_OUT = 0.1
"""Share of the points that a back-test leaves out: those of the largest models."""

PARAMS_EXPONENT, TOKENS_EXPONENT = "params_exponent", "tokens_exponent"
"""Exponents a and b of the best number of parameters and of tokens over compute: N ~ C^a, D ~ C^b, a + b = 1."""

NO_FREEDOM = f"{FEWEST_POINTS} points for {FEWEST_POINTS} constants leave nothing that shows the noise: no intervals"


@dataclass(frozen=True)
class Uncertainty:
    """95 % intervals of a law, by profile likelihood; see `region_of`.

    What varies in them is the noise of the points about the law: of each model's seed, batches and evaluated text,
    taken to be independent, normal in the logarithm of the loss and of one size. Whether the law has the right form is
    not in them.

    Attributes:
        fitted: the law and its points.
        region: laws that the points do not contradict; None: there are no more points than constants.
        untold: constants that the points do not tell whatever the noise: they have no intervals.
    """

    fitted: Fit
    region: Region | None
    untold: Sequence[Untold] = ()

    @property
    def is_band_known(self) -> bool:
        """Whether the law's losses have intervals."""
        return self.region is not None and not self.untold

    @property
    def noise(self) -> float | None:
        """Estimated relative scatter of losses about the law; None: no more points than constants."""
        return None if self.region is None else self.region.noise

    def interval(self, name: str) -> tuple[float, float]:
        """The 95 % interval of a constant, of `PARAMS_EXPONENT` or of `TOKENS_EXPONENT`.

        Not a number where the points do not tell it; infinite on a side on which they do not bound it. The law is
        fitted with Huber's loss and the interval by least squares; one that leaves the estimate out is extended to it.
        """
        if name in (PARAMS_EXPONENT, TOKENS_EXPONENT):
            return self._share_interval(name)
        if self.region is None or name in names_of(self.untold):
            return math.nan, math.nan
        region = self.region
        found = {
            "E": region.irreducible,
            "A": lambda: region.factor(0),
            "B": lambda: region.factor(1),
            "alpha": lambda: region.exponent(0),
            "beta": lambda: region.exponent(1),
        }[name]()
        return _extended(found, float(getattr(self.fitted.law, name)))

    def _share_interval(self, name: str) -> tuple[float, float]:
        law = self.fitted.law
        if self.region is None or not law.falls or {"alpha", "beta"} & set(names_of(self.untold)):
            return math.nan, math.nan
        low, high = _extended(self.region.share(), law.params_exponent)
        return (low, high) if name == PARAMS_EXPONENT else (1 - high, 1 - low)

    def band(self, params: FloatArray, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The 95 % interval of the law's loss for each model, without the noise of a single run about the law.

        Not a number where a constant has no interval.
        """
        if self.region is None or self.untold:
            return np.full_like(params, math.nan), np.full_like(params, math.nan)
        low, high = self.region.band(params, tokens)
        loss = self.fitted.law.loss(params, tokens)
        return np.minimum(low, loss), np.maximum(high, loss)


def _extended(interval: tuple[float, float], value: float) -> tuple[float, float]:
    return min(interval[0], value), max(interval[1], value)


def uncertainty_of(fitted: Fit) -> Uncertainty:
    """Intervals of a law that was fitted to its points."""
    return Uncertainty(fitted, region_of(fitted), untold(fitted))


@dataclass(frozen=True)
class BackTest:
    """What a law of the smaller models says of the largest ones.

    Attributes:
        law: of the smaller ones.
        held_out: the largest ones.
        errors: float64 [n], what it says of each, less what was measured, as a share of that.
    """

    law: ScalingLaw
    held_out: Points
    errors: FloatArray


def back_test(points: Points) -> BackTest | None:
    """Fit a law without the largest tenth of the models, one at least, and all that are as large.

    Returns:
        None where too little is left to fit a law to.
    """
    smallest = np.sort(points.params)[-max(1, int(HELD_OUT * len(points)))]
    is_large = points.params >= smallest * (1 - 1e-6)
    try:
        law = fit(points.take(~is_large)).law
    except UserError:
        return None
    held_out = points.take(is_large)
    errors = law.loss(held_out.params, held_out.tokens) / held_out.losses - 1
    return BackTest(law, held_out, errors)
