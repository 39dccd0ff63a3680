"""Uncertainty of a loss per token if documents, not tokens, are sampled independently.

A loss per token is a ratio of sums over documents. Tokens of a document are correlated, and document lengths vary
widely, so a few long documents carry most of the uncertainty. A percentile bootstrap of few documents then gives
intervals that are far too short. Here the ratio is a regression through the origin with documents as clusters: variance
by the bias-reduced estimator CR2, degrees of freedom by Bell & McCaffrey 2002 (Survey Methodology 28). See also
Pustejovsky & Tipton 2018 (Journal of Business & Economic Statistics 36).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MIN_DOCUMENTS = 3
"""Minimum number of documents for an interval: of two, one may contain nearly all of the text."""

FEW_DOCUMENTS = 20
"""Below this number an interval assumes that the documents are similar, which so few cannot show."""


@dataclass(frozen=True)
class SamplingVariance:
    """Sampling variance of estimates, with its degrees of freedom.

    Attributes:
        variance: float64 [...]; NaN: unknown.
        degrees_of_freedom: float64 [...], degrees of freedom of a t-distribution with the same relative precision.
    """

    variance: FloatArray
    degrees_of_freedom: FloatArray

    def half_width(self, confidence: float) -> FloatArray:
        """Return half of the width of the confidence intervals, [...]."""
        from scipy.special import stdtrit  # imported late: it would delay every training rank by a third of a second

        return np.asarray(stdtrit(self.degrees_of_freedom, (1 + confidence) / 2) * np.sqrt(self.variance))

    def __add__(self, other: SamplingVariance) -> SamplingVariance:
        """Return the spread of a sum of independent estimates (Satterthwaite 1946)."""
        variance = self.variance + other.variance
        weight = self.variance**2 / self.degrees_of_freedom + other.variance**2 / other.degrees_of_freedom
        degrees_of_freedom = np.divide(variance**2, weight, out=np.full_like(variance, np.inf), where=weight > 0)
        return SamplingVariance(variance, np.where(np.isnan(variance), np.nan, degrees_of_freedom))

    def scaled(self, factor: float) -> SamplingVariance:
        """Return the spread of the estimates multiplied by a constant."""
        return SamplingVariance(self.variance * factor**2, self.degrees_of_freedom)


def zero_variance_like(values: FloatArray) -> SamplingVariance:
    """Return the spread of constants: zero variance."""
    return SamplingVariance(np.zeros_like(values), np.full_like(values, np.inf))


def ratio_variance(nats: FloatArray, tokens: FloatArray) -> SamplingVariance:
    """Compute the spread of sum(nats) / sum(tokens) over independently sampled documents of random lengths.

    Args:
        nats: [..., documents] summed losses, or differences of them; documents without tokens are ignored.
        tokens: [documents] number of tokens of these losses.

    Returns:
        Spread of shape [...]; NaN with fewer than `MIN_DOCUMENTS` documents.
    """
    deviations, degrees_of_freedom = ratio_deviations(nats, tokens)
    variance = np.asarray((deviations**2).sum(axis=-1))
    return SamplingVariance(variance, np.full(variance.shape, degrees_of_freedom))


def ratio_deviations(nats: FloatArray, tokens: FloatArray | IntArray) -> tuple[FloatArray, float]:
    """Compute the contribution of each document to the error of sum(nats) / sum(tokens).

    The sum of their squares is the variance of the ratio. The sum of the products of two ratios' contributions is the
    covariance of the ratios.

    Args:
        nats: [..., documents] summed losses, or differences of them; documents without tokens contribute nothing.
        tokens: [documents] number of tokens of these losses.

    Returns:
        Contributions of shape [..., documents] and their degrees of freedom; NaN with fewer than `MIN_DOCUMENTS`
        documents that have tokens.
    """
    counted = tokens > 0
    if counted.sum() < MIN_DOCUMENTS:
        return np.full(nats.shape, math.nan), math.nan
    share = tokens / tokens.sum()  # the leverage of each document
    residuals = np.where(counted, nats - np.where(counted, nats, 0.0).sum(axis=-1, keepdims=True) * share, 0.0)
    return residuals / (tokens.sum() * np.sqrt(1 - share)), _degrees_of_freedom(share[counted])


def _degrees_of_freedom(share: FloatArray) -> float:
    """Compute Bell & McCaffrey's degrees of freedom if the variance of a mean loss is the same for all documents.

    The residuals of nats, divided by all tokens, then have covariances proportional to

        G[i, j] = h[i] h[j] (q - h[i] - h[j]) + [i = j] h[i]^2,    h: shares of the tokens, q = sum(h^2).

    The variance is sum(a[i] rest[i]^2) with a = 1 / (1 - h). It has trace(a G)^2 / trace((a G)^2) degrees of freedom.
    """
    squares = share**2
    q, w = float(squares.sum()), squares / (1 - share)
    moment = [float((w * share**k).sum()) for k in range(3)]
    every = q**2 * moment[0] ** 2 + 2 * moment[2] * moment[0] + 2 * moment[1] ** 2 - 4 * q * moment[1] * moment[0]
    own = q - 2 * share
    trace = float((w * (1 + own)).sum())
    return trace**2 / (every + float((w**2 * ((1 + own) ** 2 - own**2)).sum()))


def ratio_interval(nats: FloatArray, tokens: FloatArray, confidence: float) -> tuple[float, float] | None:
    """Compute the interval of a loss per token over independently sampled documents; see `ratio_variance`.

    Args:
        nats: [documents] summed losses.
        tokens: [documents] number of tokens of these losses.
        confidence: between 0 and 1.

    Returns:
        (lower, upper), or None with fewer than `MIN_DOCUMENTS` documents.
    """
    half = float(ratio_variance(nats, tokens).half_width(confidence))
    if math.isnan(half):
        return None
    value = float(nats.sum() / tokens.sum())
    return value - half, value + half
