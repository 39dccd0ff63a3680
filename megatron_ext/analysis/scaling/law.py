"""Fit of the law L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3).

The objective is the sum over the points of the Huber loss of the difference of log losses. With the mean instead of the
sum, the objective is so small that the default tolerances of an optimizer stop it too early. Besiroglu et al. 2024
(arXiv 2404.10102) found this to be the reason for published constants that do not fit their own points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import scipy  # `scipy.optimize` is imported at the first fit: a third of a second

from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.utils.errors import UserError

DELTA = 1e-3
"""Threshold of the Huber loss. Larger differences of log losses count linearly, so that outliers have little weight."""

STARTS = {
    "log_a": np.arange(0.0, 30.0, 5.0),
    "log_b": np.arange(0.0, 30.0, 5.0),
    "log_e": np.arange(-1.0, 1.5, 0.5),
    "alpha": np.arange(0.0, 2.5, 0.5),
    "beta": np.arange(0.0, 2.5, 0.5),
}
"""Grid of 4,500 starting points (Hoffmann et al., appendix D.3)."""

NUM_CONSTANTS = 5
"""Number of constants of a law, and minimum number of points."""

MAX_LOG = 700.0
"""Maximum logarithm of a constant; the exponential of 710 overflows double precision."""

MAX_ROUNDS = 20
"""Maximum runs of the optimizer. Each run starts where the previous one stopped, with a new curvature estimate that may
allow further progress."""

MAX_STEPS, MAX_START_STEPS = 5000, 500
"""Maximum iterations of a round in the final fit, and of the single round from each start that selects the best one."""

EXACT_OBJECTIVE = 1e-16
"""Value of the scaled objective below which a fit counts as exact: residuals of 1e-11 are rounding errors."""

MAX_REFINE_EVALUATIONS = 200
"""Maximum function evaluations of a fit that starts near its optimum."""

SAME_SIZE = 0.05
"""Relative spread within which sizes, token counts, and tokens per parameter count as equal.

Token counts are rounded to whole steps (by up to 2.5 % in a run of 20 steps), and sizes to whole widths. An increase of
the tokens by 5 % lowers the loss by beta * 5 % of the term B / D^beta. This is at most a hundredth of a nat, about the
effect of another seed.
"""

VANISHED_FRACTION, RESTART_FRACTION = 1e-2, 0.5
"""Values of a term, as fractions of the lowest loss. The gradient of a term below `VANISHED_FRACTION` is too small for
the term to grow again. A refit with such a term has a second start, where the term is `RESTART_FRACTION`."""

SAME_LOSS = 1e-6
"""Relative spread within which losses count as equal. It is smaller than `SAME_SIZE` because losses are not rounded."""


@dataclass(frozen=True)
class ScalingLaw:
    """Law L(N, D) = E + A / N^alpha + B / D^beta in nats per token, for N parameters and D tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, params: FloatArray | float, tokens: FloatArray | float) -> FloatArray:
        """Return the losses of models; the arguments are broadcast."""
        return np.asarray(self.E + self.A * np.power(params, -self.alpha) + self.B * np.power(tokens, -self.beta))

    @property
    def is_decreasing(self) -> bool:
        """True if the loss falls with both parameters and tokens."""
        return self.alpha > 0 and self.beta > 0

    @property
    def params_exponent(self) -> float:
        """Exponent a = beta / (alpha + beta) of the optimal number of parameters over compute; that of tokens is 1 - a.

        NaN if the loss does not fall with both parameters and tokens.
        """
        return self.beta / (self.alpha + self.beta) if self.is_decreasing else float("nan")

    def best_params(self, flops: FloatArray | float) -> FloatArray:
        """Return the number of parameters with the lowest loss at a compute of 6 N D (Hoffmann et al., equation 4).

        NaN if the loss does not fall with both parameters and tokens.
        """
        if not self.is_decreasing:
            return np.full_like(flops, np.nan, dtype=np.float64)
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1.0 / (self.alpha + self.beta))
        return np.asarray(g * (np.asarray(flops) / 6.0) ** (self.beta / (self.alpha + self.beta)))


@dataclass(frozen=True)
class Fit:
    """Fitted law.

    Attributes:
        law: the law.
        objective: sum of Huber losses over the points.
        points: points that the law was fitted to.
    """

    law: ScalingLaw
    objective: float
    points: Points


class _Objective:
    """Sum of Huber losses over points, and its gradient.

    The arguments [5] are the logarithms of the two power-law terms at the points' mean log N and mean log D, then
    log E, alpha and beta. A change of an exponent then rotates its term about the center of the points. With log A and
    log B as arguments, a change of an exponent would need a matching change of log A or log B.
    """

    def __init__(self, points: Points, delta: float = DELTA) -> None:
        self._delta = delta
        self._log_n, self._log_d, self._log_l = (np.log(x) for x in (points.params, points.tokens, points.losses))
        self.center_n, self.center_d = self._log_n.mean(), self._log_d.mean()
        self._n, self._d = self._log_n - self.center_n, self._log_d - self.center_d

    def __call__(self, at: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the value and the gradient [5] at arguments [5], or values [S] and gradients [S, 5] at [S, 5]."""
        u, v, e, alpha, beta = at.T[..., None]
        params_term, tokens_term = u - alpha * self._n, v - beta * self._d
        log_sum_p = np.logaddexp(np.logaddexp(params_term, tokens_term), e)
        residuals_p = log_sum_p - self._log_l
        slope_p = np.minimum(np.maximum(residuals_p, -self._delta), self._delta)
        by_params, by_tokens, by_constant = (
            np.exp(term - log_sum_p) * slope_p for term in (params_term, tokens_term, e)
        )
        slopes = [weighted_p.sum(-1) for weighted_p in (by_params, by_tokens, by_constant)]
        gradient_5 = np.array([*slopes, -(by_params @ self._n), -(by_tokens @ self._d)]).T
        return (slope_p * (residuals_p - slope_p / 2.0)).sum(-1), gradient_5

    def residuals(self, at: FloatArray) -> FloatArray:
        """Return the residuals [n] at arguments [5]: log losses of the law minus those of the points."""
        return np.logaddexp.reduce(self._terms(at), axis=0) - self._log_l

    def jacobian(self, at: FloatArray) -> FloatArray:
        """Return the derivatives [n, 5] of `residuals`."""
        terms = self._terms(at)
        params_term, tokens_term, constant = np.exp(terms - np.logaddexp.reduce(terms, axis=0))
        return np.stack([params_term, tokens_term, constant, -params_term * self._n, -tokens_term * self._d], axis=-1)

    def _terms(self, at: FloatArray) -> FloatArray:
        u, v, e, alpha, beta = at
        return np.stack([u - alpha * self._n, v - beta * self._d, np.full_like(self._n, e)])

    def refine(self, start: FloatArray) -> FloatArray:
        """Minimize from a nearby start with a trust-region method, in far fewer steps than `_descend`."""
        options = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-14, "max_nfev": MAX_REFINE_EVALUATIONS}
        result = scipy.optimize.least_squares(
            self.residuals, start, self.jacobian, loss="huber", f_scale=self._delta, x_scale="jac", **options
        )
        return np.asarray(result.x)

    def scaled(self, at: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return value and gradient divided by delta^2, a scale that suits the tolerances of an optimizer."""
        value, gradient = self(at)
        return value / self._delta**2, gradient / self._delta**2

    def arguments(self, constants: FloatArray) -> FloatArray:
        """Convert log A, log B, log E, alpha and beta [..., 5] to arguments [..., 5]."""
        at = np.array(constants, dtype=np.float64)
        at[..., 0] -= at[..., 3] * self.center_n
        at[..., 1] -= at[..., 4] * self.center_d
        return at

    def law_arguments(self, law: ScalingLaw) -> FloatArray:
        """Return the arguments [5] of a law."""
        terms = np.maximum([law.A, law.B, law.E], np.finfo(np.float64).tiny)  # a vanished term may be 0
        return self.arguments(np.array([*np.log(terms), law.alpha, law.beta]))

    def has_constants(self, at: FloatArray) -> bool:
        """Return True if arguments [5] correspond to finite constants.

        A few noisy points may have no optimal law. The fit can then always lower the objective with a steeper term,
        until the term's constant overflows.
        """
        u, v, e, alpha, beta = at
        logs = (u + alpha * self.center_n, v + beta * self.center_d, e)
        return bool(np.isfinite(at).all()) and max(logs) < MAX_LOG

    def law(self, at: FloatArray) -> ScalingLaw:
        """Return the law of arguments [5]."""
        u, v, e, alpha, beta = (float(x) for x in at)
        a, b = np.exp(u + alpha * self.center_n), np.exp(v + beta * self.center_d)
        return ScalingLaw(float(np.exp(e)), float(a), float(b), alpha, beta)


def fit(points: Points) -> Fit:
    """Fit a law with L-BFGS from the best start of each pair of exponents in `STARTS`.

    Raises:
        UserError: there are fewer than 5 distinct points, or they do not separate the effects of parameters and tokens.
    """
    check_points(points)
    objective = _Objective(points)
    ends = [_descend(objective, start, rounds=1, steps=MAX_START_STEPS) for start in _starts(objective)]
    nearest = min(ends, key=lambda end: float(objective(end)[0]))
    # With as few points as constants, many laws fit exactly. L-BFGS alone would need minutes in this flat region.
    nearest = _best(objective, [nearest, objective.refine(nearest)])
    best = _best(objective, [nearest, _descend(objective, nearest, MAX_ROUNDS)])
    return Fit(objective.law(best), float(objective(best)[0]), points)


def refit(points: Points, law: ScalingLaw, delta: float = DELTA) -> ScalingLaw:
    """Fit a law, starting at a similar law, which is faster than `fit`.

    A vanished term of the starting law would stay zero, because its gradient is zero. A second start therefore gives
    such a term a fraction of the lowest loss, and the better result counts.

    Args:
        points: points to fit.
        law: starting law.
        delta: threshold of the Huber loss.
    """
    objective = _Objective(points, delta)
    starts = [objective.law_arguments(law)]
    terms, lowest = starts[0][:3], np.log(points.losses.min())
    if terms.min() < lowest + np.log(VANISHED_FRACTION):
        starts.append(np.concatenate([np.maximum(terms, lowest + np.log(RESTART_FRACTION)), starts[0][3:]]))
    ends = [objective.refine(start) for start in starts]
    return objective.law(_best(objective, [starts[0], *ends]))


def _best(objective: _Objective, ends: list[FloatArray]) -> FloatArray:
    """Return the best arguments among those with finite constants, or `ends[0]` if none has finite constants."""
    usable = [end for end in ends if objective.has_constants(end)] or ends[:1]
    return min(usable, key=lambda end: float(objective(end)[0]))


def evaluate_objective(law: ScalingLaw, points: Points) -> float:
    """Return the sum of Huber losses of a law over points."""
    objective = _Objective(points)
    return float(objective(objective.law_arguments(law))[0])


def check_points(points: Points, where: str = "points") -> None:
    """Check that a law can be fitted to points.

    Raises:
        UserError: there are fewer than 5 distinct points, or sizes, token counts, tokens per parameter or losses are
            all equal.
    """
    distinct = len(np.unique([points.params, points.tokens], axis=1).T)
    if distinct < NUM_CONSTANTS:
        problem = f"{distinct} points with distinct params or tokens, but the law has {NUM_CONSTANTS} constants"
        raise UserError(where, problem, f"give {NUM_CONSTANTS} points or more")
    ratio = points.tokens / points.params
    for name, values, spread, result in (
        ("parameters", points.params, SAME_SIZE, "A and alpha cannot be separated from E"),
        ("tokens", points.tokens, SAME_SIZE, "B and beta cannot be separated from E"),
        (
            "tokens per parameter",
            ratio,
            SAME_SIZE,
            "effects of parameters and of tokens cannot be separated",
        ),
        ("nats of loss", points.losses, SAME_LOSS, "nothing shows what reduces it"),
    ):
        low, high = float(values.min()), float(values.max())
        if np.log(high / low) <= spread:
            value = f"{low:,.6g}" if np.log(high / low) <= SAME_LOSS else f"about {np.sqrt(low * high):,.3g}"
            hint = "add points with other sizes and other token counts"
            raise UserError(where, f"all have {value} {name}, so {result}", hint)


def num_distinct(values: FloatArray) -> int:
    """Count distinct values; values within `SAME_SIZE` of the smallest value of their group count as one."""
    remaining, count = np.sort(np.log(values)), 0
    while len(remaining):
        remaining, count = remaining[remaining > remaining[0] + SAME_SIZE], count + 1
    return count


def _starts(objective: _Objective) -> Iterator[FloatArray]:
    """Yield, for each pair of exponents in `STARTS`, the start with the smallest objective."""
    others = list(product(STARTS["log_a"], STARTS["log_b"], STARTS["log_e"]))
    for exponents in product(STARTS["alpha"], STARTS["beta"]):
        starts = objective.arguments(np.array([[*other, *exponents] for other in others]))
        yield starts[objective(starts)[0].argmin()]


def _descend(objective: _Objective, start: FloatArray, rounds: int, steps: int = MAX_STEPS) -> FloatArray:
    """Minimize with L-BFGS from a start, with restarts until a round makes no progress."""
    at, value = start, np.inf
    for _ in range(rounds):
        if float(objective.scaled(at)[0]) < EXACT_OBJECTIVE:
            break
        options = {"maxiter": steps, "maxfun": 4 * steps, "maxcor": 20, "ftol": 1e-15, "gtol": 1e-12}
        result = scipy.optimize.minimize(objective.scaled, at, jac=True, method="L-BFGS-B", options=options)
        if not result.fun < value:
            break
        at, value = result.x, result.fun
    return np.asarray(at)
