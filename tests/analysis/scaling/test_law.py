"""Scaling law: its gradient, and fits to known constants and to the points of a published figure."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import scipy  # its parts are imported at first use, not in each worker

from megatron_ext.analysis.scaling.law import (
    DELTA,
    Fit,
    ScalingLaw,
    _Objective,
    evaluate_objective,
    fit,
    num_distinct,
    refit,
)
from megatron_ext.analysis.scaling.points import Points, read_points
from megatron_ext.utils.errors import UserError

CHINCHILLA = Path(__file__).with_name("chinchilla.csv")
"""245 points of figure 4 of Hoffmann et al. 2022, as read by Besiroglu et al. 2024.

Columns are parameters, tokens (compute / 6 / parameters) and losses, with nine digits
(github.com/epoch-research/analyzing-chinchilla).
"""

KNOWN = ScalingLaw(1.7, 400.0, 1500.0, 0.34, 0.36)


def grid(law: ScalingLaw = KNOWN, noise: float = 0.0) -> Points:
    n, d = (x.ravel() for x in np.meshgrid(np.geomspace(5e7, 1e10, 7), np.geomspace(1e9, 4e11, 6)))
    factor = np.exp(noise * np.random.default_rng(5).normal(size=len(n)))
    return Points(n, d, law.loss(n, d) * factor)


@pytest.fixture(scope="module")
def chinchilla() -> Points:
    """Points without the five highest losses, which Besiroglu et al. exclude as outliers."""
    points = read_points(CHINCHILLA)[""]
    assert len(points) == 245
    return points.take(np.argsort(points.losses)[:-5])


@pytest.fixture(scope="module")
def of_chinchilla(chinchilla: Points) -> Fit:
    return fit(chinchilla)


def by_hand(law: ScalingLaw, points: Points) -> float:
    total = 0.0
    for n, d, loss in zip(points.params, points.tokens, points.losses, strict=True):
        residual = abs(np.log(law.E + law.A / n**law.alpha + law.B / d**law.beta) - np.log(loss))
        total += residual**2 / 2 if residual <= DELTA else DELTA * (residual - DELTA / 2)
    return total


def test_the_objective_is_the_sum_of_hubers_losses() -> None:
    for law in (KNOWN, ScalingLaw(1.701, 400.0, 1500.0, 0.34, 0.36), ScalingLaw(1.0, 30.0, 90.0, 0.2, 0.1)):
        assert evaluate_objective(law, grid(noise=1e-3)) == pytest.approx(by_hand(law, grid(noise=1e-3)), rel=1e-9)


@pytest.mark.parametrize("e", [0.2, 0.5306, 1.4])
def test_its_gradient_is_that_of_differences(e: float) -> None:
    objective = _Objective(grid(noise=1e-3))
    at = objective.arguments(np.array([np.log(400.0), np.log(1500.0), e, 0.34, 0.36]))
    expected = scipy.optimize.approx_fprime(at, lambda x: objective(x)[0], 1e-7)
    np.testing.assert_allclose(objective(at)[1], expected, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize(
    "law", [KNOWN, ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28), ScalingLaw(0.5, 20.0, 9000.0, 0.15, 0.5)], ids=str
)
def test_constants_come_back_to_five_digits_without_noise(law: ScalingLaw) -> None:
    np.testing.assert_allclose(astuple(fit(grid(law)).law), astuple(law), rtol=5e-6)


def test_outliers_do_not_bend_the_law() -> None:
    points = grid(noise=1e-4)
    points.losses[[3, 20, 33]] *= 1.2
    np.testing.assert_allclose(astuple(fit(points).law), astuple(KNOWN), rtol=0.03)


def test_the_published_points_give_the_published_law(of_chinchilla: Fit) -> None:
    """Besiroglu et al. report A 482, B 2085, E 1.8169, alpha 0.3478 and beta 0.3659."""
    law = of_chinchilla.law
    assert of_chinchilla.objective <= 0.0010183
    assert of_chinchilla.objective == pytest.approx(by_hand(law, of_chinchilla.points), rel=1e-9)
    assert (round(law.E, 3), round(law.alpha, 3), round(law.beta, 3)) == (1.817, 0.347, 0.367)
    assert pytest.approx(482, rel=0.03) == law.A
    assert pytest.approx(2085, rel=0.03) == law.B
    assert by_hand(ScalingLaw(1.784, 855.0, 695.0, 0.381, 0.312), of_chinchilla.points) > 1.05 * of_chinchilla.objective


def test_no_way_down_is_left(of_chinchilla: Fit) -> None:
    """The fit is a minimum: refits from ten nearby laws are not better."""
    dice = np.random.default_rng(3)
    for _ in range(10):
        near = ScalingLaw(*(np.array(astuple(of_chinchilla.law)) * np.exp(0.02 * dice.normal(size=5))))
        again = refit(of_chinchilla.points, near)
        assert evaluate_objective(again, of_chinchilla.points) >= of_chinchilla.objective * (1 - 1e-6)


@pytest.mark.parametrize("gone", [{"E": 2e-13}, {"E": 0.0}, {"A": 1e-9}, {"B": 0.0}], ids=str)
def test_a_term_that_had_vanished_comes_back(gone: dict[str, float]) -> None:
    """A bootstrap may start from a law without E, if the original points do not determine E but resampled ones do."""
    found = refit(grid(), replace(KNOWN, **gone))
    np.testing.assert_allclose(astuple(found), astuple(KNOWN), rtol=1e-3)


def test_the_best_size_is_where_the_loss_is_lowest() -> None:
    for flops in (1e18, 1e21):
        sizes = np.geomspace(1e6, 1e12, 200_001)
        lowest = sizes[KNOWN.loss(sizes, flops / 6 / sizes).argmin()]
        assert float(KNOWN.best_params(flops)) == pytest.approx(lowest, rel=1e-4)


def of_plan(sizes: np.ndarray, step: int) -> Points:
    """Points with 20 tokens per parameter, rounded to whole steps, and the losses of a law."""
    tokens = np.round(20 * sizes / step) * step
    return Points(sizes, tokens, KNOWN.loss(sizes, tokens))


def test_tokens_a_parameter_that_are_a_tenth_apart_can_be_fitted() -> None:
    some = of_plan(np.geomspace(2e7, 2e9, 6), 131_072)
    separable = Points(some.params, some.tokens * np.array([1, 1.1, 1, 1.1, 1, 1.1]), some.losses)
    assert len(fit(separable).points) == 6


def test_values_that_are_unlike() -> None:
    assert [num_distinct(np.array(x)) for x in ([5.0], [5.0, 5.2, 5.1], [1.0, 9.0, 9.1, 1.01], [1, 2, 4])] == [
        1,
        1,
        2,
        3,
    ]
    # A chain of values counts as several, however close its neighbours are.
    assert num_distinct(1.03 ** np.arange(9)) == 5


def test_points_that_say_too_little() -> None:
    points = grid()
    for some, said in (
        (points.take(np.arange(4)), "4 points with distinct params or tokens, but the law has 5 constants"),
        (points.take(np.array([0, 8, 16, 24, 24, 0])), "4 points with distinct params or tokens, but the law has 5"),
        (points.take(points.params == points.params[0]), "all have 5e+07 parameters, so A and alpha cannot"),
        (points.take(points.tokens == points.tokens[0]), "all have 1e+09 tokens, so B and beta cannot"),
        (
            Points(points.params, 20 * points.params, points.losses),
            "all have 20 tokens per parameter, so effects of",
        ),
        (of_plan(np.geomspace(2e7, 2e9, 6), 131_072), "all have about 20 tokens per parameter, so effects of"),
        (of_plan(np.geomspace(2e5, 3e6, 6), 131_072), "tokens per parameter, so effects of"),
        (Points(points.params, points.tokens, np.full(42, 2.5)), "all have 2.5 nats of loss, so nothing shows"),
    ):
        with pytest.raises(UserError) as caught:
            fit(some)
        assert said in caught.value.problem
