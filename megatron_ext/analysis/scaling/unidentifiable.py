"""Constants of a law that its points do not determine (non-identifiable), however small the noise is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.analysis.run_files import FloatArray
from megatron_ext.analysis.scaling.law import Fit, num_distinct
from megatron_ext.analysis.scaling.points import Points

CONSTANTS = ("E", "A", "B", "alpha", "beta")

MIN_VALUES = 3
"""Minimum number of distinct model sizes, and of distinct token counts. With only two sizes, there is a curve
E + A / N^alpha through both losses for every E."""

FLAT_TOLERANCE = float(np.sqrt(np.finfo(np.float64).eps))
"""Singular value of the normalized derivatives, relative to the largest, below which a direction of the constants is
flat. The objective depends on its square, which is then as small as a rounding error."""

MIN_COMPONENT = 1e-6
"""Absolute component in a flat direction (a unit vector) above which a constant counts as undetermined."""


@dataclass(frozen=True)
class Undetermined:
    """Set of constants that the points do not determine.

    Attributes:
        constants: names of the constants, in the order of `CONSTANTS`.
        reason: property of the points that leaves them undetermined.
    """

    constants: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        *others, last = self.constants
        if not others:
            return f"{self.reason}: {last} cannot be determined"
        return f"{self.reason}: {', '.join(others)} and {last} cannot be determined"


def unidentifiable(fitted: Fit) -> list[Undetermined]:
    """Return the constants that a law's points do not determine, grouped by reason; empty if all are determined."""
    found = list(_undetermined_by_few_values(fitted.points))
    undetermined = {name for group in found for name in group.constants}
    flat = _flat_constants(fitted)
    if not undetermined.issuperset(flat):
        found.append(Undetermined(flat, "other values give the same losses to first order"))
    return found


def undetermined_names(found: Sequence[Undetermined]) -> list[str]:
    """Return the names of all undetermined constants, without duplicates, in the order of `CONSTANTS`."""
    return [name for name in CONSTANTS if any(name in group.constants for group in found)]


def _undetermined_by_few_values(points: Points) -> Iterator[Undetermined]:
    """Yield constants that are undetermined because there are only two distinct sizes or token counts.

    Two sizes give two values of E + A / N^alpha for three unknowns. Two token counts likewise give two values of
    E + B / D^beta.
    """
    for noun, values, constants in (
        ("sizes", points.params, ("E", "A", "alpha")),
        ("token counts", points.tokens, ("E", "B", "beta")),
    ):
        if num_distinct(values) < MIN_VALUES:  # exactly two, because `check_points` rejects one
            yield Undetermined(constants, f"two {noun}")


def _flat_constants(fitted: Fit) -> tuple[str, ...]:
    """Return the constants with a component in a flat direction: to first order, no loss changes along it."""
    slopes_pc = _slopes(fitted)
    _, values_c, directions_cc = np.linalg.svd(slopes_pc)
    flat_c = np.concatenate([values_c, np.zeros(len(CONSTANTS) - len(values_c))]) < FLAT_TOLERANCE * values_c[0]
    has_component_c = (np.abs(directions_cc[flat_c]) > MIN_COMPONENT).any(axis=0)
    found = {name for name, has in zip(CONSTANTS, has_component_c, strict=True) if has}
    # A is the value of its term at N = 1, far from all models, so A is undetermined if alpha is. The same holds for B.
    found |= {factor for factor, exponent in (("A", "alpha"), ("B", "beta")) if exponent in found}
    return tuple(name for name in CONSTANTS if name in found)


def _slopes(fitted: Fit) -> FloatArray:
    """Return the derivatives [points, constants] of the log losses, with columns normalized to length 1 or 0.

    Write L = E + a exp(-alpha n) + b exp(-beta d), where n and d are the logarithms of N and D minus their means. Here
    a and b are A / N^alpha and B / D^beta at n = 0 and d = 0. The derivatives are proportional to

        1 / L,   exp(-alpha n) / L,   exp(-beta d) / L,   -n a exp(-alpha n) / L,   -d b exp(-beta d) / L.
    """
    law, points = fitted.law, fitted.points
    n, d = (np.log(x) - np.log(x).mean() for x in (points.params, points.tokens))
    losses = law.loss(points.params, points.tokens)
    params_term = law.A * np.power(points.params, -law.alpha) / losses
    tokens_term = law.B * np.power(points.tokens, -law.beta) / losses
    term_slopes = 1 / losses, np.exp(-law.alpha * n) / losses, np.exp(-law.beta * d) / losses
    slopes_pc = np.stack([*term_slopes, -n * params_term, -d * tokens_term], axis=-1)
    length_c = np.linalg.norm(slopes_pc, axis=0)
    # A vanished term does not determine its exponent.
    return np.asarray(np.where(length_c > FLAT_TOLERANCE**2, slopes_pc / np.maximum(length_c, FLAT_TOLERANCE**2), 0.0))
