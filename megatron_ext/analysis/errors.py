"""Errors of estimates, by independent source, so that differences and families of estimates can be formed.

An estimate's error from one source (documents, batches, seeds) is a vector of contributions. Its variance is the sum of
their squares. Two estimates that share a source have the sum of products as covariance. The error of a difference is
therefore the difference of the vectors, and what both estimates share cancels.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.utils.ratio_interval import SamplingVariance, zero_variance_like

Key = tuple[Hashable, ...]
"""Key of a source. Its first entry is the kind: `documents`, `batches`, `curve`, `seeds` or `matched documents`."""

FAMILY_DRAWS = 40_000
"""Number of draws of a family's t values. The width of its intervals then has a standard error below one percent, and
of two or three percent with one degree of freedom."""


LARGE_DEGREES = 1e4
"""Degrees of freedom that stand for a normal variable."""

BORROWED = "borrowed"
"""Second entry of the key of an error over seeds whose variance was estimated from other architectures."""


@dataclass(frozen=True)
class ErrorSource:
    """Contributions of one source to the errors of G estimates.

    Attributes:
        contributions: [G, n].
        degrees_of_freedom: [G] or one for all, degrees of freedom of the sum of their squares.
    """

    contributions: FloatArray
    degrees_of_freedom: FloatArray | float

    def difference(self, other: ErrorSource) -> ErrorSource:
        """Return the contributions to a difference of two estimates that share this source.

        Contributions with the same index cancel. As far as two estimates have contributions with different indices,
        their squares are independent, and the degrees of freedom add up (Satterthwaite 1946).
        """
        own, others = self.contributions, other.contributions
        products = np.abs(own * others).sum(axis=1)
        own_square, other_square = (own**2).sum(axis=1), (others**2).sum(axis=1)
        sizes = np.sqrt(own_square * other_square)
        overlap = np.divide(products, sizes, out=np.ones_like(sizes), where=sizes > 0)
        fourth = own_square**2 + other_square**2
        gain = np.divide((own_square + other_square) ** 2, fourth, out=np.ones_like(fourth), where=fourth > 0)
        degrees = self.degrees_of_freedom * (overlap + (1 - overlap) * gain)
        return ErrorSource(own - others, degrees)


@dataclass(frozen=True)
class Errors:
    """Errors of G estimates by source."""

    sources: Mapping[Key, ErrorSource]
    points: int

    def __sub__(self, other: Errors) -> Errors:
        """Return the errors of the difference of two estimates; sources with one key are shared and cancel."""
        sources = dict(self.sources)
        for key, source in other.sources.items():
            own = sources.get(key)
            if own is None:
                sources[key] = ErrorSource(-source.contributions, source.degrees_of_freedom)
            elif key[0] == "curve":
                sources[key] = own.difference(source)
            else:  # the same documents, steps or seeds
                sources[key] = ErrorSource(own.contributions - source.contributions, own.degrees_of_freedom)
        return Errors(sources, self.points)

    def variance(self, *kinds: str) -> SamplingVariance:
        """Return the variance [G] from the sources of these kinds; without arguments, from all sources."""
        total = zero_variance_like(np.zeros(self.points))
        seeds: list[SamplingVariance] = []
        is_borrowed = any(key[:2] == ("seeds", BORROWED) for key in self.sources)
        for key, source in self.sources.items():
            if not kinds or key[0] in kinds:
                squares = (source.contributions**2).sum(axis=1)
                spread = SamplingVariance(squares, np.broadcast_to(source.degrees_of_freedom, squares.shape))
                if key[0] == "seeds" and is_borrowed:
                    seeds.append(spread)
                else:
                    total = total + spread
        if seeds:  # one estimate enters several times, so its degrees of freedom do not add up
            degrees = np.min([spread.degrees_of_freedom for spread in seeds], axis=0)
            total = total + SamplingVariance(np.sum([spread.variance for spread in seeds], axis=0), degrees)
        return total

    def half_width(self, confidence: float) -> FloatArray:
        """Return half of the width of the confidence intervals, [G].

        The half widths of Student's t intervals for each kind of source are added in quadrature (Howe 1974, Journal of
        the American Statistical Association 69). One t interval with Satterthwaite's degrees of freedom for the sum
        would be too narrow where the variance over two or three seeds happens to be estimated too small.
        """
        squares = np.zeros(self.points)
        for kind in sorted({str(key[0]) for key in self.sources}):
            squares += self.variance(kind).half_width(confidence) ** 2
        return np.sqrt(squares)

    def at(self, point: int) -> Errors:
        """Return the errors of one of the estimates."""
        return Errors(
            {
                key: ErrorSource(source.contributions[point : point + 1], _one(source.degrees_of_freedom, point))
                for key, source in self.sources.items()
            },
            1,
        )

    def covariance(self, other: Errors) -> FloatArray:
        """Return the covariance [G] with other estimates at the same points."""
        shared = self.sources.keys() & other.sources.keys()
        total = np.zeros(self.points)
        for key in sorted(shared, key=repr):  # sums do not depend on the order of a set
            total += (self.sources[key].contributions * other.sources[key].contributions).sum(axis=1)
        return total


def _one(degrees_of_freedom: FloatArray | float, point: int) -> FloatArray | float:
    return degrees_of_freedom[point : point + 1] if isinstance(degrees_of_freedom, np.ndarray) else degrees_of_freedom


def family_half_widths(errors: Sequence[Errors], confidence: float) -> list[float]:
    """Return half of the width of intervals that hold for all estimates of a family at once with `confidence`.

    Each interval has the same level, chosen so that none of correlated t variables lies outside (Hothorn, Bretz &
    Westfall 2008, Biometrical Journal 50), from draws with a fixed seed. A variable has the degrees of freedom that its
    single interval corresponds to. Estimates of variances count as fully dependent.

    Args:
        errors: errors of single estimates (one point each) with a known variance above zero.
        confidence: between 0 and 1.
    """
    from scipy.special import gammaincinv, stdtr, stdtridf, stdtrit  # imported late, as in `ratio_interval`

    scale = np.sqrt([float(error.variance().variance[0]) for error in errors])
    single = np.array([float(error.half_width(confidence)[0]) for error in errors]) / scale
    degrees = stdtridf((1 + confidence) / 2, single)  # NaN for a normal variable
    degrees = np.minimum(np.where(np.isnan(degrees), LARGE_DEGREES, degrees), LARGE_DEGREES)
    covariance = np.array([[float(one.covariance(other)[0]) for other in errors] for one in errors])
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    generator = np.random.default_rng(0)
    normal = generator.standard_normal((FAMILY_DRAWS, len(errors))) @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    uniform = generator.random((FAMILY_DRAWS, 1))
    variance = 2 * gammaincinv(degrees / 2, uniform) / degrees  # chi-squared over its degrees of freedom
    tail = stdtr(degrees, -np.abs(normal) / np.sqrt(variance)).min(axis=1)
    level = float(np.quantile(tail, 1 - confidence))
    return [float(width) for width in -stdtrit(degrees, level) * scale]
