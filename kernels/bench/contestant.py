"""Contestants of the benchmark, and the references for their results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.bench.cases import Shape
from kernels.bench.costs import Operations

LIMIT = 1e-2
"""Largest ||output - reference|| / ||reference|| over 256 rows of a head: bf16 gives 2e-3 to 6e-3, a wrong row 6e-2."""

GRADIENT_LIMIT = 2e-2
"""Largest relative error of a gradient. dq, which is rounded twice, reaches 1e-2 if many queries choose one chunk."""


class NotRun(Exception):
    """A contestant cannot run here or at this shape; the message gives the reason."""


def one_line(error: Exception) -> str:
    """Return an exception's type and the first line of its message."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}".rstrip(": ")


class ChoiceComparison(NamedTuple):
    """Comparison of an op's choices with those by float64 scores.

    Attributes:
        compared: number of compared choices.
        different: number of differing choices.
        wrong: number of choices that are impossible, or differ by more than rounding.
        impossible: number of impossible choices: a later chunk, none although there is one, or one chunk twice.
        worst: largest difference of the scores, relative to what rounding allows.
    """

    compared: int
    different: int
    wrong: int
    impossible: int
    worst: float


@dataclass(frozen=True, kw_only=True)
class TimedPart:
    """A computation with a float64 reference: the whole contestant, or one of its modes.

    Attributes:
        run: (q, k, v) -> output [b, t, hq, d], and its choices [b, t, heads, m] or None.
        reference: (q, k, v, choices, query_offset) -> output, in float64 for float64 inputs, with those choices.
        compare: (q, k, choices, query_offset) -> comparison with float64 scores; None without choices.
        limit: largest relative error of the output; 0 for bitwise equality.
        name: name in messages.
        keys_per_choice: divisor that converts choices to chunks.
    """

    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
    reference: Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]
    compare: Callable[[Tensor, Tensor, Tensor, int], ChoiceComparison] | None = None
    limit: float = LIMIT
    name: str = "output"
    keys_per_choice: int = 1


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One implementation at one shape.

    Attributes:
        run: (q, k, v) -> output [b, t, hq, d]; the timed function.
        parts: computations to check.
        operations: operations that the op requires.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    parts: tuple[TimedPart, ...]
    operations: Operations


Builder = Callable[[Shape], Contestant]
"""Makes a contestant for a shape; raises NotRun."""
