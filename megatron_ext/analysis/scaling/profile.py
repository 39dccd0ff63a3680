"""Profile-likelihood confidence intervals of a scaling law (Bates & Watts 1988, chapter 6).

The model of the noise is a factor exp(sigma * e) on each loss, with e independent and standard normal and sigma
unknown. A value of a constant, or of any function of the constants, is in its 95 % interval if the least-squares fit
that is constrained to this value has a residual sum of squares of at most

    S_min * (1 + t^2 / (n - 5)),    t: 97.5 % quantile of Student's t with n - 5 degrees of freedom.

For given exponents the law is linear in E, A and B. A two-dimensional grid of exponents is therefore sufficient. Each
node of the grid has a least-squares problem with the constraints E, A, B >= 0. The problem has a closed-form solution
for each of the seven sets of non-zero terms. There are no random draws.

Single runs may be outliers, to which least squares are sensitive. The losses are therefore replaced by Huber's
pseudo-observations, see `robust`. Without outliers, these equal the losses or nearly do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from scipy.special import stdtrit

from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.analysis.scaling.law import NUM_CONSTANTS, Fit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.robust import MIN_NOISE, RobustFit, fit_robust

CONFIDENCE = 0.95

MIN_EXPONENT, MAX_EXPONENT = -1.0, 4.0
"""Range of the exponents. An interval that reaches an end of this range is unbounded on that side. With a larger
exponent, a term affects only the smallest models, and the other losses hardly depend on the exponent."""

SEARCH_NODES, NODES = 21, 49
"""Nodes per axis of the search grid and of the final grid. With the final grid, the ends of an interval are accurate to
about a hundredth of the interval's length."""

MAX_MOVES = 24
"""Maximum number of moves of the search grid."""

BLOCK_ELEMENTS = 2**15
"""Maximum elements of an array [functions, K]: 256 KiB, so that the arrays of a block stay in the CPU's cache."""

FACES = tuple(face for size in (1, 2, 3) for face in combinations(range(3), size))
"""Sets of non-zero terms, as indices into (E, A, B)."""


@dataclass(frozen=True)
class _Face:
    """Solutions of unconstrained least squares at K nodes, with F of the three terms E, A and B.

    Attributes:
        terms: indices of the F terms.
        terms_kf: [K, F], coefficients of the terms.
        inverse_kff: [K, F, F], inverse of the triangular factor R of the design matrix.
        squares_k: [K], residual sums of squares; infinite where the terms are collinear.
    """

    terms: tuple[int, ...]
    terms_kf: FloatArray
    inverse_kff: FloatArray
    squares_k: FloatArray

    def take(self, selection: np.ndarray) -> _Face:
        return _Face(self.terms, self.terms_kf[selection], self.inverse_kff[selection], self.squares_k[selection])


class _LeastSquares:
    """Least-squares problems of log losses, by pair of exponents.

    A term is represented by its value at the points' mean log N and mean log D. Design columns are relative to the
    losses of the robust law.
    """

    def __init__(self, robust_fit: RobustFit, points: Points) -> None:
        log_n, log_d = np.log(points.params), np.log(points.tokens)
        self.centers = float(log_n.mean()), float(log_d.mean())
        self.n, self.d = log_n - self.centers[0], log_d - self.centers[1]
        self.weights = 1 / robust_fit.law.loss(points.params, points.tokens)
        # Log losses are expanded to first order about the robust law's losses `at`: log(m) = log(at) + (m - at) / at.
        # The fit is then linear in the losses m.
        self.targets = 1 + robust_fit.residuals

    def columns(self, alpha: FloatArray, beta: FloatArray) -> FloatArray:
        """Return the design matrices [K, n, 3] of E, A and B at K pairs of exponents."""
        ones = np.ones((len(alpha), len(self.n)))
        return self.weights[:, None] * np.stack(
            [ones, np.exp(-alpha[:, None] * self.n), np.exp(-beta[:, None] * self.d)], axis=-1
        )

    def faces(self, alpha: FloatArray, beta: FloatArray) -> list[_Face]:
        """Solve the least-squares problem of every face at K pairs of exponents."""
        columns_kn3 = self.columns(alpha, beta)
        q_kn3, r_k33 = np.linalg.qr(columns_kn3)
        coordinates_k3 = np.einsum("kni,n->ki", q_kn3, self.targets)
        residuals_kn = self.targets - np.einsum("kni,ki->kn", q_kn3, coordinates_k3)
        return [_face(face, r_k33[..., list(face)], coordinates_k3, (residuals_kn**2).sum(-1)) for face in FACES]


def _face(face: tuple[int, ...], columns_k3f: FloatArray, targets_k3: FloatArray, all_terms_k: FloatArray) -> _Face:
    """Solve the least-squares problem of a face.

    Args:
        face: indices of its terms.
        columns_k3f: design columns of the face in the orthonormal basis of all three terms.
        targets_k3: targets in the same basis.
        all_terms_k: residual sum of squares of the fit with all three terms.
    """
    lengths_kf = np.linalg.norm(columns_k3f, axis=1)
    q_k3f, r_kff = np.linalg.qr(columns_k3f / lengths_kf[:, None])
    is_determined_k = np.abs(np.diagonal(r_kff, axis1=-2, axis2=-1)).min(-1) > 1e-10
    inverse_kff = (
        np.linalg.inv(np.where(is_determined_k[:, None, None], r_kff, np.eye(len(face)))) / lengths_kf[..., None]
    )
    coordinates_kf = np.einsum("kif,ki->kf", q_k3f, targets_k3)
    residuals_k3 = targets_k3 - np.einsum("kif,kf->ki", q_k3f, coordinates_kf)
    squares_k = np.where(is_determined_k, all_terms_k + (residuals_k3**2).sum(-1), np.inf)
    return _Face(face, np.einsum("kfg,kg->kf", inverse_kff, coordinates_kf), inverse_kff, squares_k)


def _constrained_minimum(faces: Sequence[_Face]) -> FloatArray:
    """Return the minimum sums of squares [K] subject to E, A, B >= 0, over the faces without negative terms."""
    candidates = [np.where((face.terms_kf >= 0).all(-1), face.squares_k, np.inf) for face in faces]
    return np.asarray(np.min(candidates, axis=0))


@dataclass(frozen=True)
class Region:
    """Confidence region of laws, as ellipsoids of (E, A, B) at K pairs of exponents.

    Attributes:
        alpha: float64 [K], exponents of parameters in the region.
        beta: float64 [K], exponents of tokens in the region.
        faces: least-squares solutions at the K pairs.
        limit: residual sum of squares at the boundary of the region.
        centers: mean logarithms of parameters and tokens, at which the values of the terms are given.
        noise: estimate of sigma, the relative scatter of losses about the law.
        is_open: True where the region reaches an end of the exponents' range: lower and upper end of alpha, lower and
            upper end of beta.
    """

    alpha: FloatArray
    beta: FloatArray
    faces: Sequence[_Face]
    limit: float
    centers: tuple[float, float]
    noise: float
    is_open: tuple[bool, bool, bool, bool]

    def exponent(self, index: int) -> tuple[float, float]:
        """Return the interval of alpha (0) or beta (1), infinite on an open side."""
        values = (self.alpha, self.beta)[index]
        below, above = self.is_open[2 * index : 2 * index + 2]
        return -math.inf if below else float(values.min()), math.inf if above else float(values.max())

    def params_exponent(self) -> tuple[float, float]:
        """Return the interval of beta / (alpha + beta), the exponent of the optimal size over compute.

        Only laws of the region that fall with both parameters and tokens count; NaN if there are none.
        """
        is_decreasing = (self.alpha > 0) & (self.beta > 0)
        if not is_decreasing.any():
            return math.nan, math.nan
        values = self.beta[is_decreasing] / (self.alpha[is_decreasing] + self.beta[is_decreasing])
        has_others = not is_decreasing.all()
        reaches_zero = self.is_open[1] or (has_others and bool((self.beta <= 0).any()))
        reaches_one = self.is_open[3] or (has_others and bool((self.alpha <= 0).any()))
        return 0.0 if reaches_zero else float(values.min()), 1.0 if reaches_one else float(values.max())

    def irreducible_loss(self) -> tuple[float, float]:
        """Return the interval of E."""
        ones_k, zeros_k = np.ones_like(self.alpha), np.zeros_like(self.alpha)
        low, high = self._extremes(1, lambda _: (ones_k, zeros_k, zeros_k))
        return float(low[0]), float(high[0])

    def factor(self, index: int) -> tuple[float, float]:
        """Return the interval of A (0) or B (1).

        Where the interval of its exponent is open, the lower end is 0 and the upper end infinite.
        """
        rows_3k = np.zeros((3, len(self.alpha)))
        rows_3k[1 + index] = np.exp((self.alpha, self.beta)[index] * self.centers[index])
        low, high = self._extremes(1, lambda _: list(rows_3k))
        below, above = self.is_open[2 * index : 2 * index + 2]
        return 0.0 if below else float(low[0]), math.inf if above else float(high[0])

    def band(self, params: FloatArray, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the interval of the law's loss for each model, without the noise of a single run; arguments [...]."""
        n, d = np.log(params).ravel() - self.centers[0], np.log(tokens).ravel() - self.centers[1]
        ones_k = np.ones_like(self.alpha)

        def rows(block: slice) -> tuple[FloatArray, ...]:
            return ones_k, np.exp(-np.outer(n[block], self.alpha)), np.exp(-np.outer(d[block], self.beta))

        low, high = self._extremes(len(n), rows)
        return low.reshape(np.shape(params)), high.reshape(np.shape(params))

    def _extremes(self, number: int, rows: Callable[[slice], Sequence[FloatArray]]) -> tuple[FloatArray, FloatArray]:
        """Compute the minima and maxima, [P] each, of linear functions of (E, A, B) over the region.

        Args:
            number: P, the number of functions.
            rows: function that returns the coefficients of E, A and B of a slice of the functions, [slice, K] or [K]
                each.
        """
        low, high = np.full(number, np.inf), np.full(number, -np.inf)
        parts = [part for face in self.faces for part in _ellipsoids(face, self.limit)]
        block = max(1, BLOCK_ELEMENTS // len(self.alpha))
        for start in range(0, number, block):
            chosen = slice(start, start + block)
            rows_3pk = rows(chosen)
            for part in parts:
                minima, maxima = part.extremes(rows_3pk)
                low[chosen], high[chosen] = np.minimum(low[chosen], minima), np.maximum(high[chosen], maxima)
        return low, high


@dataclass(frozen=True)
class _Ellipsoids:
    """Ellipsoids of one face at M of the region's K pairs of exponents.

    Attributes:
        face: least-squares solutions at the M pairs.
        nodes: int64 [M], indices of these pairs among the K.
        slack_m: [M], square roots of the differences between the limit and the residual sums of squares.
        may_be_negative: True if points of the ellipsoids may have negative terms.
    """

    face: _Face
    nodes: np.ndarray
    slack_m: FloatArray
    may_be_negative: bool

    def extremes(self, rows_3pk: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Return the minima and maxima, [P] each, of linear functions over these ellipsoids.

        An extreme with a negative term is invalid. The valid extreme is then on another face.

        Args:
            rows_3pk: coefficients of E, A and B, [P, K] or [K] each.
        """
        rows_fpm = [rows_3pk[term][..., self.nodes] for term in self.face.terms]
        terms_fm, inverse_ffm = self.face.terms_kf.T.copy(), np.moveaxis(self.face.inverse_kff, 0, -1).copy()
        terms = range(len(rows_fpm))
        center_pm = sum(rows_fpm[f] * terms_fm[f] for f in terms)
        # The inverse is upper triangular.
        gradients_fpm = [sum(rows_fpm[f] * inverse_ffm[f, g] for f in terms[: g + 1]) for g in terms]
        norms_pm = np.sqrt(sum(gradient_pm**2 for gradient_pm in gradients_fpm))
        reach_pm = self.slack_m * norms_pm
        minima_pm, maxima_pm = center_pm - reach_pm, center_pm + reach_pm
        if self.may_be_negative:
            step_pm = self.slack_m / np.maximum(norms_pm, np.finfo(float).tiny)
            for f in terms:
                offsets_pm = step_pm * sum(inverse_ffm[f, g] * gradients_fpm[g] for g in terms[f:])
                minima_pm[terms_fm[f] - offsets_pm < 0] = np.inf
                maxima_pm[terms_fm[f] + offsets_pm < 0] = -np.inf
        return minima_pm.min(-1), maxima_pm.max(-1)


def _ellipsoids(face: _Face, limit: float) -> Iterator[_Ellipsoids]:
    """Yield the ellipsoids of a face that lie in the region: first those without, then those with negative terms."""
    is_inside = face.squares_k <= limit
    slack_k = np.sqrt(np.where(is_inside, limit - face.squares_k, 0))
    reach_kf = slack_k[:, None] * np.linalg.norm(face.inverse_kff, axis=-1)
    may_be_negative_k = (face.terms_kf < reach_kf * (1 + 1e-9)).any(-1)
    for selected_k, may_be_negative in ((is_inside & ~may_be_negative_k, False), (is_inside & may_be_negative_k, True)):
        if len(nodes := np.flatnonzero(selected_k)):
            yield _Ellipsoids(face.take(nodes), nodes, slack_k[nodes], may_be_negative)


def confidence_region(fitted: Fit) -> Region | None:
    """Compute the 95 % confidence region of laws of a fit; None if there are not more points than constants."""
    degrees_of_freedom = len(fitted.points) - NUM_CONSTANTS
    if degrees_of_freedom < 1:
        return None
    robust_fit = fit_robust(fitted)
    problems = _LeastSquares(robust_fit, fitted.points)
    threshold = 1 + float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) ** 2 / degrees_of_freedom
    grid = _Grid(problems, np.array([robust_fit.law.alpha, robust_fit.law.beta]), threshold, degrees_of_freedom)
    alpha, beta, squares, steps = grid.final_grid()
    inside = squares <= grid.limit
    alpha, beta = alpha[inside], beta[inside]
    is_open = tuple(
        bool(x)
        for values, step in ((alpha, steps[0]), (beta, steps[1]))
        for x in (values.min() < MIN_EXPONENT + step, values.max() > MAX_EXPONENT - step)
    )
    noise = math.sqrt(grid.minimum / degrees_of_freedom)
    faces = problems.faces(alpha, beta)
    return Region(alpha, beta, faces, grid.limit, problems.centers, noise, is_open)  # type: ignore[arg-type]


class _Grid:
    """Grid of exponents over the region, along the axes of its ellipse in the limit of small noise."""

    def __init__(self, problems: _LeastSquares, start: FloatArray, threshold: float, degrees_of_freedom: int) -> None:
        self._problems, self._threshold, self._floor = problems, threshold, degrees_of_freedom * MIN_NOISE**2
        self._center = np.clip(start, MIN_EXPONENT + 1e-3, MAX_EXPONENT)
        self.minimum = np.inf
        self._evaluate(self._center[:, None])
        self._axes = self._ellipse()
        corners = np.array(list(product((MIN_EXPONENT, MAX_EXPONENT), repeat=2)))
        limits = np.linalg.solve(self._axes, (corners - self._center).T)
        self._limits = limits.min(1), limits.max(1)

    @property
    def limit(self) -> float:
        """Residual sum of squares at the boundary of the region."""
        return self.minimum * self._threshold

    def final_grid(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Move and scale the grid until it covers the region, and evaluate the final grid.

        Returns:
            Alpha, beta and minimum sums of squares at the nodes, [K] each, and the distance of neighboring nodes along
            alpha and beta, [2].
        """
        low, high = np.full(2, -1.5), np.full(2, 1.5)
        for _ in range(MAX_MOVES):
            nodes = self._nodes(low, high, SEARCH_NODES)
            squares = self._evaluate(self._center[:, None] + self._axes @ nodes)
            step = (high - low) / (SEARCH_NODES - 1)
            inside = nodes[:, squares <= self.limit]
            if not inside.size:  # the region is smaller than the distance of the nodes
                inside = nodes[:, [int(squares.argmin())]]
            first, last = inside.min(1), inside.max(1)
            is_cut = first < low + step / 2, last > high - step / 2
            new_low = np.maximum(np.where(is_cut[0], low - (high - low) / 2, first - 1.5 * step), self._limits[0])
            new_high = np.minimum(np.where(is_cut[1], high + (high - low) / 2, last + 1.5 * step), self._limits[1])
            change = np.abs([new_low - low, new_high - high]).max(0) / (high - low)
            low, high = new_low, new_high
            if change.max() < 0.1:
                break
        exponents = self._center[:, None] + self._axes @ self._nodes(low, high, NODES)
        squares, steps = self._evaluate(exponents), np.abs(self._axes) @ (high - low) / (NODES - 1)
        return exponents[0], exponents[1], squares, steps

    @staticmethod
    def _nodes(low: FloatArray, high: FloatArray, number: int) -> FloatArray:
        return np.stack(np.meshgrid(*np.linspace(low, high, number).T)).reshape(2, -1)

    def _evaluate(self, exponents: FloatArray) -> FloatArray:
        """Return minimum sums of squares [K] at exponents [2, K], infinite out of range, and update `minimum`."""
        inside = ((exponents >= MIN_EXPONENT - 1e-9) & (exponents <= MAX_EXPONENT + 1e-9)).all(0)
        squares = np.full(exponents.shape[1], np.inf)
        squares[inside] = _constrained_minimum(self._problems.faces(*exponents[:, inside]))
        self.minimum = min(self.minimum, max(float(squares.min()), self._floor))
        return squares

    def _ellipse(self) -> FloatArray:
        """Return the half axes of the region as columns [2, 2], by a second-order expansion at the center."""
        (full,) = (face for face in self._problems.faces(*self._center[:, None]) if len(face.terms) == 3)
        columns_n3 = self._problems.columns(*self._center[:, None])[0]
        slopes_n2 = -columns_n3[:, 1:] * full.terms_kf[0, 1:] * np.stack([self._problems.n, self._problems.d], axis=-1)
        q, _ = np.linalg.qr(columns_n3)
        slopes_n2 -= q @ (q.T @ slopes_n2)
        values, axes = np.linalg.eigh(slopes_n2.T @ slopes_n2)
        margin = self.limit - self.minimum
        widest = MAX_EXPONENT - MIN_EXPONENT
        return np.asarray(axes * np.sqrt(margin / np.maximum(values, margin / widest**2)))
