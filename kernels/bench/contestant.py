"""What is timed, and what its result is held against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.bench.cases import Shape
from kernels.bench.costs import Operations

LIMIT = 1e-2
"""Largest ||output - reference|| / ||reference|| of 256 rows of a head: bf16 gives 2e-3 to 6e-3, a wrong row 6e-2."""

GRADIENT_LIMIT = 2e-2
"""The same of a gradient: dq, rounded twice on its way, comes to 1e-2 where choices crowd."""


class NotRun(Exception):
    """A contestant cannot run here or at this shape; the message says why."""


def one_line(error: Exception) -> str:
    """An exception's kind and the first line of what it says."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}".rstrip(": ")


class Choices(NamedTuple):
    """How an op's choices differ from those by float64 scores.

    Attributes:
        compared: choices looked at.
        different: those that differ.
        wrong: those of them beyond rounding, and those that cannot be.
        impossible: of the wrong ones, those that cannot be: a later chunk, none where there is one, one twice.
        worst: the largest distance of the scores over what rounding allows.
    """

    compared: int
    different: int
    wrong: int
    impossible: int
    worst: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something computed that has a float64 reference: the whole contestant, or one of its modes.

    Attributes:
        run: (q, k, v) -> output [b, t, hq, d], and the choices [b, t, heads, m] that it made or was given, or None.
        reference: (q, k, v, choices, query_offset) -> output, in float64 over float64, with those choices.
        compare: (q, k, choices, query_offset) -> how they compare with float64 scores; None: no choices.
        limit: largest relative error of the output; 0: to the last bit.
        name: for messages.
        keys_per_choice: to turn choices into chunks.
    """

    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
    reference: Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]
    compare: Callable[[Tensor, Tensor, Tensor, int], Choices] | None = None
    limit: float = LIMIT
    name: str = "output"
    keys_per_choice: int = 1


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One implementation at one shape.

    Attributes:
        run: (q, k, v) -> output [b, t, hq, d]; what is timed.
        parts: what is checked.
        operations: what it must do.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    parts: tuple[Part, ...]
    operations: Operations


Builder = Callable[[Shape], Contestant]
"""Makes a contestant for a shape; raises NotRun."""
