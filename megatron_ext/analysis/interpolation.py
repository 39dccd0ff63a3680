"""Monotone interpolation of a loss between the evaluations of a run, and the error of that interpolation.

The interpolant is the piecewise cubic of Fritsch & Butland 1984 (SIAM Journal on Scientific and Statistical Computing
5), which SciPy calls PCHIP. It is monotone where its points are. Its value is homogeneous of degree one in the losses.
So by Euler's theorem it is the product of the losses and its derivatives with respect to them. These derivatives are
the weights below. The same weights interpolate every document, and they carry errors of the losses to first order.
"""

from __future__ import annotations

import numpy as np

from megatron_ext.analysis.run_files import FloatArray, IntArray

MIN_EVALUATIONS = 7
"""Minimum number of evaluations for an estimate of the error of a curve: all but the two outermost can be left out."""

MIN_NEIGHBOURS, MAX_NEIGHBOURS = 5, 15
"""Limits of the number of neighbouring evaluations from which the error of a curve at an evaluation is estimated."""

_REACH = 3
"""Number of neighbours on each side that the interpolant at a point left out depends on at most."""


def monotone_weights(x: FloatArray, y: FloatArray, at: FloatArray) -> FloatArray:
    """Return the weights [G, E] of a monotone interpolation from points `x`, `y` [E] to `at` [G].

    Points are sorted by x, not by time. Values at equal x are averaged.

    Returns:
        Weights whose product with `y` is the interpolated value. Rows outside the range of `x` are NaN: there is no
        extrapolation.
    """
    unique, index, counts = np.unique(x, return_inverse=True, return_counts=True)
    mean = (index == np.arange(len(unique))[:, None]) / counts[:, None]  # [unique, E]
    return _weights(unique, mean @ y, at) @ mean


def _weights(x: FloatArray, y: FloatArray, at: FloatArray) -> FloatArray:
    """Return the weights for strictly ascending `x`."""
    if len(x) == 1:
        return np.where(at == x[0], 1.0, np.nan)[:, None]
    points, slopes = np.eye(len(x)), _slope_weights(x, y)
    left = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    width = (x[left + 1] - x[left])[:, None]
    t = (at - x[left])[:, None] / width
    values = (1 + 2 * t) * (1 - t) ** 2 * points[left] + t**2 * (3 - 2 * t) * points[left + 1]
    weights = values + width * (t * (1 - t) ** 2 * slopes[left] + t**2 * (t - 1) * slopes[left + 1])
    return np.where(((at < x[0]) | (at > x[-1]))[:, None], np.nan, weights)


def _slope_weights(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return the derivatives [E, E] of the slope at each point with respect to each y."""
    width, number = np.diff(x), len(x)
    secant = np.diff(y) / width
    secant_weights = (np.eye(number)[1:] - np.eye(number)[:-1]) / width[:, None]
    if number == 2:
        return np.repeat(secant_weights, 2, axis=0)
    by_secant = np.zeros((number, number - 1))
    inner = np.arange(1, number - 1)
    before, after = secant[:-1], secant[1:]
    weight_before, weight_after = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    is_monotone = before * after > 0
    before, after = np.where(is_monotone, before, 1.0), np.where(is_monotone, after, 1.0)
    total = weight_before + weight_after
    slope = np.where(is_monotone, total / (weight_before / before + weight_after / after), 0.0)
    by_secant[inner, inner - 1] = slope**2 / total * weight_before / before**2
    by_secant[inner, inner] = slope**2 / total * weight_after / after**2
    by_secant[0, :2] = _end_weights(width[:2], secant[:2])
    by_secant[-1, -2:] = _end_weights(width[:-3:-1], secant[:-3:-1])[::-1]
    return by_secant @ secant_weights


def _end_weights(width: FloatArray, secant: FloatArray) -> tuple[float, float]:
    """Return the derivatives of the slope at an end with respect to the two secants next to it, the nearest first."""
    nearest = (2 * width[0] + width[1]) / (width[0] + width[1])
    second = -width[0] / (width[0] + width[1])
    slope = nearest * secant[0] + second * secant[1]
    if slope * secant[0] <= 0:
        return 0.0, 0.0
    if secant[0] * secant[1] <= 0 and abs(slope) > 3 * abs(secant[0]):
        return 3.0, 0.0
    return float(nearest), float(second)


def local_slope(x: FloatArray, y: FloatArray, at: FloatArray) -> FloatArray:
    """Return the slope [G] at `at` [G] of a line through the nearest `MIN_NEIGHBOURS` of the points x, y [E].

    A slope from two neighbouring points would be dominated by noise.
    """
    nearest = np.argsort(np.abs(x - at[:, None]), axis=1, kind="stable")[:, :MIN_NEIGHBOURS]  # [G, neighbours]
    near_x, near_y = x[nearest], y[nearest]
    centred = near_x - near_x.mean(axis=1, keepdims=True)
    squares = (centred**2).sum(axis=1)
    return np.divide((centred * near_y).sum(axis=1), squares, out=np.zeros_like(at), where=squares > 0)


def left_out_residuals(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return the residual [E] of each evaluation from the curve through the others, in units of its own error.

    A residual from n other points with weights w has 1 + sum(w^2) times the variance of a single point. It is divided
    by the square root of that. Residuals contain the noise of the checkpoint, of the batches in its training loss, and
    the error of interpolation over twice the usual distance, so they tend to be too large.

    Returns:
        Residuals in nats per token; NaN for the points of lowest and highest x, which would be extrapolated.
    """
    order = np.argsort(x, kind="stable")
    residuals = np.full(len(x), np.nan)
    for rank in range(1, len(x) - 1):
        window = order[max(0, rank - _REACH) : rank + _REACH + 1]
        point, others = order[rank], window[window != order[rank]]
        (weights,) = monotone_weights(x[others], y[others], x[point : point + 1])
        residuals[point] = (y[point] - weights @ y[others]) / np.sqrt(1 + weights @ weights)
    return residuals


def neighbouring_residuals(residuals: FloatArray) -> FloatArray:
    """Return the known residuals [E, K] of the K evaluations nearest in time to each evaluation.

    K is a third of the known residuals, within `MIN_NEIGHBOURS` and `MAX_NEIGHBOURS`.
    """
    known: IntArray = np.flatnonzero(~np.isnan(residuals))
    number = min(int(np.clip(len(known) // 3, MIN_NEIGHBOURS, MAX_NEIGHBOURS)), len(known))
    distance = np.abs(known - np.arange(len(residuals))[:, None])
    return residuals[known[np.argsort(distance, axis=1, kind="stable")[:, :number]]]
