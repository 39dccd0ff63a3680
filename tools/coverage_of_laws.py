"""Coverage of confidence intervals: scaling laws, IsoFLOP parabolas and the power law of test loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from megatron_ext.analysis.scaling.isoflop import best_sizes, budgets
from megatron_ext.analysis.scaling.law import Fit, ScalingLaw, refit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.transfer import Line, difference, fit_line
from megatron_ext.analysis.scaling.uncertainty import PARAMS_EXPONENT, compute_uncertainty
from megatron_ext.analysis.scaling.unidentifiable import CONSTANTS

LAW = ScalingLaw(1.7, 400.0, 1500.0, 0.34, 0.36)
SYMMETRIC = ScalingLaw(1.7, 400.0, 400.0, 0.35, 0.35)
"""Law whose loss at equal compute is symmetric about the best size, so that a fitted parabola has its minimum there."""

INTERPOLATED, EXTRAPOLATED = (5e8, 1e10), (6e10, 1.2e12)
"""Parameters and tokens of two predictions: one within the fitted points, one at ten times the largest model."""

Noise = Callable[[Points, np.random.Generator], np.ndarray]
"""Standardised errors of log losses, [n]."""


def normal(points: Points, generator: np.random.Generator) -> np.ndarray:
    """Draw normal errors with equal variance."""
    return generator.normal(size=len(points))


def heavy(points: Points, generator: np.random.Generator) -> np.ndarray:
    """Draw errors from Student's t with 3 degrees of freedom, which produces outliers."""
    return generator.standard_t(3, size=len(points)) / np.sqrt(3)


def uneven(points: Points, generator: np.random.Generator) -> np.ndarray:
    """Draw normal errors, three times as large for the smallest model as for the largest."""
    log_n = np.log(points.params)
    return generator.normal(size=len(points)) * 3 ** (1 - (log_n - log_n.min()) / np.ptp(log_n))


def design(number: int) -> Points:
    """Return the noise-free points of `number` models that span a factor of 60 in parameters and in tokens."""
    if number == 6:
        n = np.array([1e8, 1e8, 4e8, 1.6e9, 1.6e9, 6e9])
        d = np.array([2e9, 6e10, 1e10, 4e9, 1.2e11, 3e10])
    else:
        sizes, lengths = {9: (3, 3), 16: (4, 4), 50: (10, 5)}[number]
        grid = np.meshgrid(np.geomspace(1e8, 6e9, sizes), np.geomspace(2e9, 1.2e11, lengths))
        n, d = (x.ravel() for x in grid)
    return Points(n, d, LAW.loss(n, d))


def law_coverage(number: int, noise: float, experiments: int, seed: int = 0, kind: Noise = normal) -> dict[str, float]:
    """Return the share of experiments in which the intervals of a fitted law contain the true values.

    Args:
        number: number of points; 6, 9, 16 or 50.
        noise: standard deviation of log losses.
        experiments: number of experiments.
        seed: random seed of the noise.
        kind: distribution of the noise.

    Returns:
        Coverage of each constant, of the exponent of the best size, and of the law's loss at two models.
    """
    generator, exact, hits = np.random.default_rng([seed, number]), design(number), Counter[str]()
    truth = {name: getattr(LAW, name) for name in (*CONSTANTS, PARAMS_EXPONENT)}
    params, tokens = (np.array(x) for x in zip(INTERPOLATED, EXTRAPOLATED, strict=True))
    for _ in range(experiments):
        losses = exact.losses * np.exp(noise * kind(exact, generator))
        points = Points(exact.params, exact.tokens, losses)
        uncertainty = compute_uncertainty(Fit(refit(points, LAW), 0.0, points))
        for name, value in truth.items():
            low, high = uncertainty.interval(name)
            # If the fitted law does not decrease there is no best size and no interval. Count the experiment as a hit.
            hits[name] += low <= value <= high or bool(np.isnan(low))
        low_p, high_p = uncertainty.band(params, tokens)
        inside = (low_p <= LAW.loss(params, tokens)) & (LAW.loss(params, tokens) <= high_p)
        hits["loss within"] += bool(inside[0])
        hits["loss beyond"] += bool(inside[1])
    return {name: count / experiments for name, count in hits.items()}


def isoflop_coverage(sizes: int, noise: float, experiments: int, seed: int = 0) -> dict[str, float]:
    """Return the coverage of intervals of a parabola's minimum and of the exponent of the best size, over five budgets.

    A minimum outside the range of sizes has no interval and is not counted.
    """
    generator, hits, tries = np.random.default_rng([seed, sizes]), Counter[str](), Counter[str]()
    flops = np.geomspace(1e19, 1e21, 5)
    n = np.concatenate([SYMMETRIC.best_params(c) * np.geomspace(1 / 3, 3, sizes) for c in flops])
    d = np.repeat(flops, sizes) / 6 / n
    for _ in range(experiments):
        fits = budgets(Points(n, d, SYMMETRIC.loss(n, d) * np.exp(noise * generator.normal(size=len(n)))))
        for fit in fits:
            if fit.best_params is not None:
                low, high = fit.best_interval or (0.0, np.inf)
                tries["minimum"] += 1
                hits["minimum"] += low <= float(SYMMETRIC.best_params(fit.flops)) <= high
                hits["bounded"] += fit.best_interval is not None
        best = best_sizes(fits)
        if best is not None and best.exponent_interval is not None:
            tries["exponent"] += 1
            hits["exponent"] += best.exponent_interval[0] <= 0.5 <= best.exponent_interval[1]
    tries["bounded"] = tries["minimum"]
    return {name: hits[name] / tries[name] for name in ("minimum", "bounded", "exponent")}


def transfer_coverage(
    number: tuple[int, int], spread: tuple[float, float], error: float, experiments: int, seed: int = 0
) -> dict[str, float]:
    """Return the coverage of intervals of the power law of test loss, and of the test that two mixers have one curve.

    Args:
        number: number of models of each of two mixers, whose true curves are equal.
        spread: relative scatter of the test losses about the curve, for each mixer.
        error: relative error of the training losses, which the regression assumes to be exact.
        experiments: number of experiments.
        seed: random seed of the noise.

    Returns:
        Coverage of the exponent and of the ratio of the curves, and the share of experiments in which the test does
        not reject equal curves at 5 % ("same curve").
    """
    generator, hits = np.random.default_rng([seed, *number]), Counter[str]()
    for _ in range(experiments):
        lines: list[Line] = []
        for models, scatter in zip(number, spread, strict=True):
            train = np.linspace(2.2, 3.2, models)
            test = 1.1 * train**1.05 * np.exp(scatter * generator.normal(size=models))
            line = fit_line(train * np.exp(error * generator.normal(size=models)), test)
            assert line is not None
            lines.append(line)
        low, high = lines[0].exponent_interval
        hits["exponent"] += low <= 1.05 <= high
        ratio = difference(*lines)
        assert ratio.interval is not None
        hits["ratio"] += ratio.interval[0] <= 1 <= ratio.interval[1]
        hits["same curve"] += ratio.p_value >= 0.05
    return {name: count / experiments for name, count in hits.items()}
