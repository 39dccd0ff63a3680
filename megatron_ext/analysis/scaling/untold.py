"""Which constants of a law its points do not tell, however small the noise is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.runs import FloatArray
from megatron_ext.analysis.scaling.law import Fit, number_unlike
from megatron_ext.analysis.scaling.points import Points

CONSTANTS = ("E", "A", "B", "alpha", "beta")

FEWEST_VALUES = 3
"""Unlike sizes: through two values of E + A / N^alpha goes a curve for every E. The same holds of tokens."""

FLAT = float(np.sqrt(np.finfo(np.float64).eps))
"""Singular value below which a direction is flat: what is minimised goes with its square, and that is rounding."""

PART = 1e-6
"""Of a flat direction, from which on a constant has part in it."""


@dataclass(frozen=True)
class Untold:
    """Constants that cannot be told apart.

    Attributes:
        constants: their names, in the order of `CONSTANTS`.
        why: what of the points does not tell them.
    """

    constants: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        *others, last = self.constants
        if not others:
            return f"{self.why}: {last} cannot be told"
        return f"{self.why}: {', '.join(others)} and {last} cannot be told apart"


def untold(fitted: Fit) -> list[Untold]:
    """The constants that the points of a law do not tell, by the reason; none where they tell all."""
    found = list(_of_few_values(fitted.points))
    known = {name for one in found for name in one.constants}
    flat = _flat(fitted)
    if not known.issuperset(flat):
        found.append(Untold(flat, "other constants have the same losses to all digits"))
    return found


def names_of(found: Sequence[Untold]) -> list[str]:
    """All constants that are untold, each once and in order."""
    return [name for name in CONSTANTS if any(name in one.constants for one in found)]


def _of_few_values(points: Points) -> Iterator[Untold]:
    """With two sizes the losses have two values of E + A / N^alpha, three unknowns; the like of tokens."""
    for what, values, constants in (
        ("sizes", points.params, ("E", "A", "alpha")),
        ("numbers of tokens", points.tokens, ("E", "B", "beta")),
    ):
        if number_unlike(values) < FEWEST_VALUES:  # and not one: `check_points`
            yield Untold(constants, f"two {what}")


def _flat(fitted: Fit) -> tuple[str, ...]:
    """Constants along which the losses do not change: those in the null space of their derivatives at the law."""
    slopes_pc = _slopes(fitted)
    _, values_c, directions_cc = np.linalg.svd(slopes_pc)
    flat_c = np.concatenate([values_c, np.zeros(len(CONSTANTS) - len(values_c))]) < FLAT * values_c[0]
    has_part_c = (np.abs(directions_cc[flat_c]) > PART).any(axis=0)
    found = {name for name, has in zip(CONSTANTS, has_part_c, strict=True) if has}
    # A is the height of its term at one parameter, far from all models: without the slope it is not known.
    found |= {factor for factor, exponent in (("A", "alpha"), ("B", "beta")) if exponent in found}
    return tuple(name for name in CONSTANTS if name in found)


def _slopes(fitted: Fit) -> FloatArray:
    """Derivatives of the logarithms of the losses, [points, constants], each column of length one or none.

    With L = E + a exp(-alpha n) + b exp(-beta d), where n and d are the logarithms less their means, they go with

        1 / L,   exp(-alpha n) / L,   exp(-beta d) / L,   -n a exp(-alpha n) / L,   -d b exp(-beta d) / L.
    """
    law, points = fitted.law, fitted.points
    n, d = (np.log(x) - np.log(x).mean() for x in (points.params, points.tokens))
    losses = law.loss(points.params, points.tokens)
    of_params = law.A * np.power(points.params, -law.alpha) / losses
    of_tokens = law.B * np.power(points.tokens, -law.beta) / losses
    heights = 1 / losses, np.exp(-law.alpha * n) / losses, np.exp(-law.beta * d) / losses
    slopes_pc = np.stack([*heights, -n * of_params, -d * of_tokens], axis=-1)
    length_c = np.linalg.norm(slopes_pc, axis=0)
    # A term that has vanished says nothing of its exponent.
    return np.asarray(np.where(length_c > FLAT**2, slopes_pc / np.maximum(length_c, FLAT**2), 0.0))
