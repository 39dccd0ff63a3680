"""How sure a law is: the points drawn again, and the largest models left out and foretold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from megatron_ext.analysis.matched import INTERVAL
from megatron_ext.analysis.runs import FloatArray
from megatron_ext.analysis.scaling.law import Fit, ScalingLaw, check_points, fit, objective_of, refit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.untold import Untold, names_of, tells_less, untold
from megatron_ext.errors import UserError

HELD_OUT = 0.1
"""Share of the points that a back-test leaves out: those of the largest models."""


@dataclass(frozen=True)
class Sampled:
    """Laws of points that were drawn again.

    Attributes:
        laws: of each draw that a law can be fitted to.
        objectives: float64 [draws], of each law on its own draw.
        untold: constants that the points do not tell: the laws of all draws lie at one place of a flat valley, and so
            say nothing of how far it goes.
    """

    laws: Sequence[ScalingLaw]
    objectives: FloatArray
    untold: Sequence[Untold] = ()

    def interval(self, name: str) -> tuple[float, float]:
        """The 95 % percentile interval of a constant, or of the objective.

        Not a number where there are no draws, or where the points do not tell the constant.
        """
        if not self.laws or name in names_of(self.untold):
            return math.nan, math.nan
        values = self.objectives if name == "objective" else [getattr(law, name) for law in self.laws]
        low, high = np.percentile(values, INTERVAL)
        return float(low), float(high)

    def band(self, params: FloatArray, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The 95 % interval of the law's loss for each model; not a number where a constant has none."""
        if not self.laws or self.untold:
            return np.full_like(params, math.nan), np.full_like(params, math.nan)
        low, high = np.percentile([law.loss(params, tokens) for law in self.laws], INTERVAL, axis=0)
        return np.asarray(low), np.asarray(high)


def bootstrap(fitted: Fit, draws: int, seed: int, *, progress: bool = False) -> Sampled:
    """Fit the law again to as many points as there are, drawn with replacement, `draws` times.

    Draws that no law can be fitted to, as those of less than five unlike points or of one size, are passed over, and
    so are draws of two sizes, or two numbers of tokens, where the points have more: they leave a constant where it was.
    """
    generator = np.random.default_rng(seed)
    laws, objectives = [], []
    for _ in tqdm(range(draws), desc="bootstrap", disable=not progress, leave=False):
        numbers = generator.integers(len(fitted.points), size=len(fitted.points))
        drawn = fitted.points.take(numbers)
        try:
            check_points(fitted.points.take(np.unique(numbers)))
        except UserError:
            continue
        if tells_less(drawn, fitted.points):
            continue
        laws.append(refit(drawn, fitted.law))
        objectives.append(objective_of(laws[-1], drawn))
    return Sampled(laws, np.array(objectives), untold(fitted))


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
