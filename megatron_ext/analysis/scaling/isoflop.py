"""IsoFLOP fit: the minimum of a parabola is the optimal size for a compute budget (arXiv 2203.15556, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from megatron_ext.analysis.run_files import FloatArray, IntArray
from megatron_ext.analysis.scaling.law import SAME_SIZE
from megatron_ext.analysis.scaling.points import Points

SAME_COMPUTE = 1.12
"""Maximum ratio of the compute of two points of one budget. Compute varies within a budget because tokens are rounded
to whole batches, and sizes to whole widths."""

MIN_GAP, MIN_GAP_RATIO = 1.02, 2.0
"""Criterion that splits points within `SAME_COMPUTE` into two budgets: a gap in compute by at least the factor
`MIN_GAP`, whose logarithm is also at least `MIN_GAP_RATIO` times that of the largest other gap."""

SAME_RUN = 1.01
"""Maximum ratio of the compute of repeated runs of one size. A larger ratio suggests that a budget mixes several."""

MIN_SIZES = 4
"""Minimum number of distinct sizes in a budget. A parabola fits any three points exactly."""

MIN_SIZE_RATIO = 2.0
"""Minimum ratio of the largest to the smallest size in a budget. Below it, losses differ mostly by noise."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Budget:
    """Models of about the same compute, with a parabola of their losses.

    Attributes:
        flops: geometric mean of 6 * params * tokens.
        points: the models.
        curve: coefficients of the parabola of loss over log params, highest power first.
        best_params: number of parameters at the minimum of the parabola; None: there is no minimum within the range of
            the models.
        best_interval: 95 % interval of `best_params`, for independent normal noise of equal variance; None if the
            interval is not bounded on both sides, or `best_params` is None.
        doubt: reason to suspect that the points belong to several budgets; empty if there is none.
    """

    flops: float
    points: Points
    curve: FloatArray
    best_params: float | None
    best_interval: tuple[float, float] | None = None
    doubt: str = ""

    @property
    def best_tokens(self) -> float | None:
        """Number of tokens at the optimal size; None if that is unknown."""
        return None if self.best_params is None else self.flops / (6.0 * self.best_params)


@dataclass(frozen=True)
class PowerLaw:
    """Power law y = factor * x^exponent.

    Attributes:
        factor: value at x = 1.
        exponent: slope in logarithms.
        exponent_interval: 95 % interval by Student's t, from the scatter of the points about the line in logarithms;
            None: there are only two points.
    """

    factor: float
    exponent: float
    exponent_interval: tuple[float, float] | None = None


def budgets(points: Points) -> list[Budget]:
    """Group points into budgets with at least four distinct sizes, in ascending order of compute."""
    order = np.argsort(points.params * points.tokens, kind="stable")
    return [_budget(points.take(indices)) for indices in _groups(points, order)]


def best_sizes(budgets: list[Budget]) -> PowerLaw | None:
    """Fit a power law of the optimal number of parameters over compute.

    Returns:
        None if fewer than two budgets have an optimal number of parameters.
    """
    optima = [(budget.flops, budget.best_params) for budget in budgets if budget.best_params is not None]
    if len(optima) < 2:
        return None
    log_flops, log_params = np.log(np.array(optima, dtype=np.float64)).T
    exponent, log_factor = np.polyfit(log_flops, log_params, 1)
    interval = None
    if (degrees_of_freedom := len(optima) - 2) > 0:
        residuals = log_params - np.polyval([exponent, log_factor], log_flops)
        error = math.sqrt(residuals @ residuals / degrees_of_freedom / np.sum((log_flops - log_flops.mean()) ** 2))
        half_width = float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) * error
        interval = float(exponent) - half_width, float(exponent) + half_width
    return PowerLaw(float(np.exp(log_factor)), float(exponent), interval)


def _groups(points: Points, order: IntArray) -> Iterator[IntArray]:
    """Yield the indices of the points of each budget. `order` and the result are in ascending order of compute.

    Points are split at the largest gap in compute until no group is wider than `SAME_COMPUTE`. A group is split further
    at a clear gap (`MIN_GAP`) if the points on both sides form a budget.
    """
    if not _is_budget(points, order):
        return
    log_flops = np.log(points.params[order] * points.tokens[order])
    gaps = np.diff(log_flops)
    cut = int(gaps.argmax()) + 1
    if log_flops[-1] - log_flops[0] > math.log(SAME_COMPUTE) or _is_clear(points, order, gaps, cut):
        yield from _groups(points, order[:cut])
        yield from _groups(points, order[cut:])
    else:
        yield order


def _is_budget(points: Points, indices: IntArray) -> bool:
    """Return True if points have enough distinct sizes over a large enough range. Their compute is not checked."""
    sizes = np.unique(points.params[indices])
    return len(sizes) >= MIN_SIZES and bool(sizes[-1] >= MIN_SIZE_RATIO * sizes[0])


def _is_clear(points: Points, order: IntArray, gaps: FloatArray, cut: int) -> bool:
    """Return True if the gap before point `cut` separates two budgets."""
    others = np.delete(gaps, cut - 1)
    is_wide = gaps[cut - 1] >= max(math.log(MIN_GAP), MIN_GAP_RATIO * float(others.max(initial=0.0)))
    return bool(is_wide) and all(_is_budget(points, side) for side in (order[:cut], order[cut:]))


def _budget(points: Points) -> Budget:
    log_n = np.log(points.params)
    curve = np.polyfit(log_n, points.losses, 2)
    lowest = -curve[1] / (2 * curve[0]) if curve[0] > 0 else np.inf
    is_inside = log_n.min() <= lowest <= log_n.max()
    flops = float(np.exp(np.log(6 * points.params * points.tokens).mean()))
    if not is_inside:
        return Budget(flops, points, curve, None, doubt=_doubt(points))
    return Budget(flops, points, curve, float(np.exp(lowest)), _lowest_interval(points), _doubt(points))


def _lowest_interval(points: Points) -> tuple[float, float] | None:
    """Return Fieller's interval of the minimum of a parabola: sizes at which a t-test does not reject a slope of 0.

    The slope at x is 2 a x + b. It is 0 within t standard errors if (2 a x + b)^2 <= t^2 var(2 a x + b). Both sides
    are quadratic in x. The solutions are the interval between two roots, or an unbounded set if the difference of the
    sides opens downwards.
    """
    degrees_of_freedom = len(points) - 3
    if degrees_of_freedom < 1:
        return None
    log_n = np.log(points.params)
    center = log_n.mean()
    design = np.vander(log_n - center, 3)
    (a, b, c), *_ = np.linalg.lstsq(design, points.losses, rcond=None)
    residuals = points.losses - design @ [a, b, c]
    covariance = float(residuals @ residuals) / degrees_of_freedom * np.linalg.inv(design.T @ design)
    t_squared = float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) ** 2
    square = 4 * (a**2 - t_squared * covariance[0, 0])
    linear = 4 * (a * b - t_squared * covariance[0, 1])
    constant = b**2 - t_squared * covariance[1, 1]
    inner = max(linear**2 - 4 * square * constant, 0.0)  # negative only by rounding
    if square <= 0:
        return None
    low, high = ((-linear + sign * math.sqrt(inner)) / (2 * square) for sign in (-1, 1))
    return math.exp(low + center), math.exp(high + center)


def _doubt(points: Points) -> str:
    """Describe sizes that occur at several values of compute, which suggests several budgets; empty if none do."""
    order = np.argsort(points.params)
    log_n = np.log(points.params[order])
    log_flops = np.log(points.params[order] * points.tokens[order])
    size_index = np.concatenate([[0], np.cumsum(np.diff(log_n) > SAME_SIZE)])
    spans = [float(np.ptp(log_flops[size_index == size])) for size in range(size_index[-1] + 1)]
    repeated = [span for span in spans if span > math.log(SAME_RUN)]
    if not repeated:
        return ""
    difference = 100 * math.expm1(max(repeated))
    return (
        f"{len(repeated)} of its {len(spans)} sizes occur more than once, with compute up to {difference:.2g} % apart: "
        "these may be several budgets that are too close to separate"
    )
