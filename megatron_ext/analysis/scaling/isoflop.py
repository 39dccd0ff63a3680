"""IsoFLOP: the best size for a compute, as the bottom of a parabola (Hoffmann et al. 2022, arXiv 2203.15556, 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.runs import FloatArray
from megatron_ext.analysis.scaling.points import Points

SAME_COMPUTE = 1.12
"""Points of one budget differ in compute by this factor at most: tokens are rounded to batches, sizes to widths."""

FEWEST_SIZES = 4
"""Of a budget: a parabola goes through any three."""

SPREAD = 2.0
"""Of a budget's sizes, at least, as a factor: what lies closer together shows the noise of its losses alone."""


@dataclass(frozen=True)
class Budget:
    """Models of about the same compute.

    Attributes:
        flops: geometric mean of 6 * params * tokens.
        points: the models.
        curve: coefficients of the parabola of loss over the logarithm of params, the highest power first.
        best_params: where the parabola is lowest; None: it is not, or beyond the sizes that were trained.
    """

    flops: float
    points: Points
    curve: FloatArray
    best_params: float | None

    @property
    def best_tokens(self) -> float | None:
        """Tokens for the best size."""
        return None if self.best_params is None else self.flops / (6.0 * self.best_params)


@dataclass(frozen=True)
class PowerLaw:
    """y = factor * x^exponent."""

    factor: float
    exponent: float


def budgets(points: Points) -> list[Budget]:
    """Budgets of four unlike sizes or more, by rising compute."""
    return sorted((_budget(points.take(numbers)) for numbers in _groups(points)), key=lambda budget: budget.flops)


def best_sizes(found: list[Budget]) -> PowerLaw | None:
    """How the best number of parameters grows with compute; None where fewer than two budgets tell."""
    told = [(budget.flops, budget.best_params) for budget in found if budget.best_params is not None]
    if len(told) < 2:
        return None
    log_flops, log_params = np.log(np.array(told, dtype=np.float64)).T
    exponent, log_factor = np.polyfit(log_flops, log_params, 1)
    return PowerLaw(float(np.exp(log_factor)), float(exponent))


def _groups(points: Points) -> Iterator[np.ndarray]:
    """Numbers of the points of each budget: again and again the most points that are of about the same compute."""
    left = np.argsort(points.params * points.tokens)
    while len(left):
        log_flops = np.log(points.params[left] * points.tokens[left])
        ends = np.searchsorted(log_flops, log_flops + np.log(SAME_COMPUTE), side="right")
        start = int((ends - np.arange(len(left))).argmax())
        chosen = left[start : ends[start]]
        sizes = np.unique(points.params[chosen])
        if len(chosen) < FEWEST_SIZES:
            return
        if len(sizes) >= FEWEST_SIZES and sizes[-1] >= SPREAD * sizes[0]:
            yield chosen
        left = np.delete(left, np.arange(start, ends[start]))


def _budget(points: Points) -> Budget:
    log_n = np.log(points.params)
    curve = np.polyfit(log_n, points.losses, 2)
    lowest = -curve[1] / (2 * curve[0]) if curve[0] > 0 else np.inf
    is_inside = log_n.min() <= lowest <= log_n.max()
    flops = float(np.exp(np.log(6 * points.params * points.tokens).mean()))
    return Budget(flops, points, curve, float(np.exp(lowest)) if is_inside else None)
