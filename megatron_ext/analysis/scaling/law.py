"""L(N, D) = E + A / N^alpha + B / D^beta, fitted as by Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3).

What is minimised is the sum, over the points, of Huber's loss of the difference of log losses. A mean in its place is
so small that an optimiser's usual tolerances end it early, at another law; Besiroglu et al. 2024 (arXiv 2404.10102)
found that to be the reason for constants that do not fit their own points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import least_squares, minimize

from megatron_ext.analysis.runs import FloatArray
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.errors import UserError

DELTA = 1e-3
"""Of Huber's loss: larger differences of log losses count linearly, so that single runs do not bend the law."""

STARTS = {
    "log_a": np.arange(0.0, 30.0, 5.0),
    "log_b": np.arange(0.0, 30.0, 5.0),
    "log_e": np.arange(-1.0, 1.5, 0.5),
    "alpha": np.arange(0.0, 2.5, 0.5),
    "beta": np.arange(0.0, 2.5, 0.5),
}
"""The grid of Hoffmann et al., appendix D.3: 4,500 starts."""

FEWEST_POINTS = 5
"""As many as there are constants."""

LARGEST_LOG = 700.0
"""Of a constant: the exponential of 710 is beyond double precision."""

ROUNDS = 20
"""Of the optimiser, each from where the one before ended: it begins a new picture of the curvature, and may go on."""

STEPS, FIRST_STEPS = 5000, 500
"""Of a round at most; and from the starts, which have only to show where it is worth to go on."""

EXACT = 1e-16
"""Of the scaled objective: residuals of 1e-11, which are rounding."""

NEAR_STEPS = 200
"""Of a fit that begins near its end."""

ALIKE = 0.05
"""Relative spread within which sizes, numbers of tokens, and tokens a parameter count as one.

Tokens are rounded to whole steps, which in a run of 20 steps is 2.5 % either way, and sizes to whole widths. What 5 %
more tokens do to a loss is beta * 5 % of the term B / D^beta, a hundredth of a nat at most: as much as another seed
does.
"""

FAINT, RAISED = 1e-2, 0.5
"""Of the lowest loss: a term below the first has no slope to come back by, and from the second on it has one."""

SAME_LOSS = 1e-6
"""Relative spread within which losses count as one: they are not rounded to anything."""


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats a token, for N parameters and D tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, params: FloatArray | float, tokens: FloatArray | float) -> FloatArray:
        """Losses of models; arguments as numpy broadcasts them."""
        return np.asarray(self.E + self.A * np.power(params, -self.alpha) + self.B * np.power(tokens, -self.beta))

    @property
    def falls(self) -> bool:
        """Whether more parameters, and more tokens, lower the loss."""
        return self.alpha > 0 and self.beta > 0

    @property
    def params_exponent(self) -> float:
        """Exponent a of the best number of parameters over compute, beta / (alpha + beta); that of tokens is 1 - a.

        Not a number where the loss does not fall with both parameters and tokens.
        """
        return self.beta / (self.alpha + self.beta) if self.falls else float("nan")

    def best_params(self, flops: FloatArray | float) -> FloatArray:
        """Parameters of the lowest loss for a compute of 6 N D operations (Hoffmann et al., equation 4).

        Not a number where the loss does not fall with both parameters and tokens.
        """
        if not self.falls:
            return np.full_like(flops, np.nan, dtype=np.float64)
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1.0 / (self.alpha + self.beta))
        return np.asarray(g * (np.asarray(flops) / 6.0) ** (self.beta / (self.alpha + self.beta)))


@dataclass(frozen=True)
class Fit:
    """A law and how well it fits.

    Attributes:
        law: the law.
        objective: sum of Huber's losses.
        points: it was fitted to.
    """

    law: ScalingLaw
    objective: float
    points: Points


class _Objective:
    """Sum of Huber's losses over points, and its gradient.

    Its arguments [5] are the logarithms of both terms at the points' mean logarithms, log E, alpha and beta: a change
    of an exponent then turns a term about the middle of the points, where log A alone would have to follow it.
    """

    def __init__(self, points: Points, delta: float = DELTA) -> None:
        self._delta = delta
        self._log_n, self._log_d, self._log_l = (np.log(x) for x in (points.params, points.tokens, points.losses))
        self.middle_n, self.middle_d = self._log_n.mean(), self._log_d.mean()
        self._n, self._d = self._log_n - self.middle_n, self._log_d - self.middle_d

    def __call__(self, at: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values [...] and gradients [..., 5] at arguments [..., 5]."""
        u, v, e, alpha, beta = np.moveaxis(at, -1, 0)[..., None]
        of_params, of_tokens = u - alpha * self._n, v - beta * self._d
        log_sum_p = np.logaddexp(np.logaddexp(of_params, of_tokens), e)
        share_3p = np.stack([np.exp(x - log_sum_p) for x in (of_params, of_tokens, e)], axis=-2)
        rest_p = log_sum_p - self._log_l
        slope_p = np.clip(rest_p, -self._delta, self._delta)
        pull_3p = share_3p * slope_p[..., None, :]
        exponents_2 = np.stack([-(pull_3p[..., 0, :] @ self._n), -(pull_3p[..., 1, :] @ self._d)], axis=-1)
        gradient_5 = np.concatenate([pull_3p.sum(-1), exponents_2], axis=-1)
        return (slope_p * (rest_p - slope_p / 2.0)).sum(-1), gradient_5

    def rest(self, at: FloatArray) -> FloatArray:
        """[n] log losses of a law less those of the points, at arguments [5]."""
        return np.logaddexp.reduce(self._terms(at), axis=0) - self._log_l

    def slopes(self, at: FloatArray) -> FloatArray:
        """[n, 5] derivatives of `rest`."""
        terms = self._terms(at)
        of_params, of_tokens, constant = np.exp(terms - np.logaddexp.reduce(terms, axis=0))
        return np.stack([of_params, of_tokens, constant, -of_params * self._n, -of_tokens * self._d], axis=-1)

    def _terms(self, at: FloatArray) -> FloatArray:
        u, v, e, alpha, beta = at
        return np.stack([u - alpha * self._n, v - beta * self._d, np.full_like(self._n, e)])

    def near(self, start: FloatArray) -> FloatArray:
        """Arguments of the smallest value near a start, by a trust region: far fewer steps than `_descend` needs."""
        options = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-14, "max_nfev": NEAR_STEPS}
        found = least_squares(
            self.rest, start, self.slopes, loss="huber", f_scale=self._delta, x_scale="jac", **options
        )
        return np.asarray(found.x)

    def scaled(self, at: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Times 1 / delta^2: of the size that an optimiser's tolerances are made for."""
        value, gradient = self(at)
        return value / self._delta**2, gradient / self._delta**2

    def arguments(self, constants: FloatArray) -> FloatArray:
        """Those of log A, log B, log E, alpha and beta, [..., 5] to [..., 5]."""
        at = np.array(constants, dtype=np.float64)
        at[..., 0] -= at[..., 3] * self.middle_n
        at[..., 1] -= at[..., 4] * self.middle_d
        return at

    def arguments_of(self, law: ScalingLaw) -> FloatArray:
        """Those of a law."""
        terms = np.maximum([law.A, law.B, law.E], np.finfo(np.float64).tiny)  # one that has vanished may be 0
        return self.arguments(np.array([*np.log(terms), law.alpha, law.beta]))

    def has_constants(self, at: FloatArray) -> bool:
        """Whether arguments [5] are those of a law whose constants are numbers.

        Few points with much noise may have no best law: the fit then lowers the objective for ever by a steeper term,
        until its constant is beyond all numbers.
        """
        u, v, e, alpha, beta = at
        logs = (u + alpha * self.middle_n, v + beta * self.middle_d, e)
        return bool(np.isfinite(at).all()) and max(logs) < LARGEST_LOG

    def law(self, at: FloatArray) -> ScalingLaw:
        """Of arguments."""
        u, v, e, alpha, beta = (float(x) for x in at)
        a, b = np.exp(u + alpha * self.middle_n), np.exp(v + beta * self.middle_d)
        return ScalingLaw(float(np.exp(e)), float(a), float(b), alpha, beta)


def fit(points: Points) -> Fit:
    """Fit a law: the best of what L-BFGS finds from the most promising start of each pair of exponents.

    Raises:
        UserError: there are fewer than 5 points, or they cannot tell parameters and tokens apart.
    """
    check_points(points)
    objective = _Objective(points)
    ends = [_descend(objective, start, rounds=1, steps=FIRST_STEPS) for start in _starts(objective)]
    nearest = min(ends, key=lambda end: float(objective(end)[0]))
    # Points as few as constants have a long valley of laws through all of them, in which L-BFGS goes on for minutes.
    nearest = _best(objective, [nearest, objective.near(nearest)])
    best = _best(objective, [nearest, _descend(objective, nearest, ROUNDS)])
    return Fit(objective.law(best), float(objective(best)[0]), points)


def refit(points: Points, law: ScalingLaw, delta: float = DELTA) -> ScalingLaw:
    """Fit a law to points from a law that is near, which is faster than `fit`; `delta` is Huber's.

    A term that has vanished from the law would stay so whatever the points say. It is begun with once more, as a part
    of their losses, and the better end counts.
    """
    objective = _Objective(points, delta)
    starts = [objective.arguments_of(law)]
    terms, lowest = starts[0][:3], np.log(points.losses.min())
    if terms.min() < lowest + np.log(FAINT):
        starts.append(np.concatenate([np.maximum(terms, lowest + np.log(RAISED)), starts[0][3:]]))
    ends = [objective.near(start) for start in starts]
    return objective.law(_best(objective, [starts[0], *ends]))


def _best(objective: _Objective, ends: list[FloatArray]) -> FloatArray:
    """Arguments of the smallest value, of those whose constants are numbers; the first where there are none."""
    usable = [end for end in ends if objective.has_constants(end)] or ends[:1]
    return min(usable, key=lambda end: float(objective(end)[0]))


def objective_of(law: ScalingLaw, points: Points) -> float:
    """Sum of Huber's losses of a law over points."""
    objective = _Objective(points)
    return float(objective(objective.arguments_of(law))[0])


def check_points(points: Points, where: str = "points") -> None:
    """Refuse points that no law can be fitted to.

    Raises:
        UserError: why.
    """
    unlike = len(np.unique([points.params, points.tokens], axis=1).T)
    if unlike < FEWEST_POINTS:
        problem = f"{unlike} points of unlike params or tokens, and the law has {FEWEST_POINTS} constants"
        raise UserError(where, problem, f"give {FEWEST_POINTS} points or more")
    ratio = points.tokens / points.params
    for name, values, spread, why in (
        ("parameters", points.params, ALIKE, "A and alpha cannot be told from E"),
        ("tokens", points.tokens, ALIKE, "B and beta cannot be told from E"),
        ("tokens a parameter", ratio, ALIKE, "what more parameters do and what more tokens do is one"),
        ("nats of loss", points.losses, SAME_LOSS, "nothing is seen of what makes it fall"),
    ):
        low, high = float(values.min()), float(values.max())
        if np.log(high / low) <= spread:
            about = f"{low:,.6g}" if np.log(high / low) <= SAME_LOSS else f"about {np.sqrt(low * high):,.3g}"
            mend = "add points with other sizes and other numbers of tokens"
            raise UserError(where, f"all have {about} {name}, and so {why}", mend)


def number_unlike(values: FloatArray) -> int:
    """How many unlike values there are: of those that lie within `ALIKE` of the smallest among them, one counts."""
    left, number = np.sort(np.log(values)), 0
    while len(left):
        left, number = left[left > left[0] + ALIKE], number + 1
    return number


def _starts(objective: _Objective) -> Iterator[FloatArray]:
    """Of each pair of exponents the start with the smallest objective."""
    others = list(product(STARTS["log_a"], STARTS["log_b"], STARTS["log_e"]))
    for exponents in product(STARTS["alpha"], STARTS["beta"]):
        starts = objective.arguments(np.array([[*other, *exponents] for other in others]))
        yield starts[objective(starts)[0].argmin()]


def _descend(objective: _Objective, start: FloatArray, rounds: int, steps: int = STEPS) -> FloatArray:
    """Go down from a start until a round gains nothing."""
    at, value = start, np.inf
    for _ in range(rounds):
        if float(objective.scaled(at)[0]) < EXACT:
            break
        options = {"maxiter": steps, "maxfun": 4 * steps, "maxcor": 20, "ftol": 1e-15, "gtol": 1e-12}
        found = minimize(objective.scaled, at, jac=True, method="L-BFGS-B", options=options)
        if not found.fun < value:
            break
        at, value = found.x, found.fun
    return np.asarray(at)
