"""Compare results with float64 references: sampled rows of long sequences, and short sequences completely."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.bench.cases import Shape
from kernels.bench.contestant import GRADIENT_LIMIT, Builder, TimedPart

MAX_GRADIENT_LENGTH = 4096
"""Longest sequence for which all gradients are checked against a float64 reference."""

SAMPLE_SIZE = 16
"""Number of consecutive queries in a sample."""

ERROR_ROWS = 256
"""Number of consecutive positions over which a relative error is computed: few enough to reveal one wrong position."""

MAX_SCORE_BYTES = 2**29
"""Maximum bytes of a float64 array [heads, queries, keys]. A reference needs about eight such arrays."""

Draw = Callable[[Shape], tuple[Tensor, Tensor, Tensor]]
"""Function that draws new random q, k, v of a shape."""


class QueryBlock(NamedTuple):
    """Queries start .. end - 1 of one batch row, for some of the `num_heads` query heads and their key heads."""

    row: int
    start: int
    end: int
    num_heads: int
    heads: slice
    groups: slice

    def select(self, x_bthd: Tensor, *, start: int) -> Tensor:
        """Return the positions from `start` to the block's end, for the heads of this block."""
        heads = self.heads if x_bthd.shape[2] == self.num_heads else self.groups
        return x_bthd.detach()[self.row : self.row + 1, start : self.end, heads]

    def inputs_float64(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's queries, and the keys and values from position 0 to its end, in float64."""
        return (
            self.select(q, start=self.start).double(),
            self.select(k, start=0).double(),
            self.select(v, start=0).double(),
        )


class Result(NamedTuple):
    """Inputs and outputs of a part."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    chosen: Tensor | None

    def choices(self, block: QueryBlock) -> Tensor | None:
        """Return the choices of the block's queries."""
        return None if self.chosen is None else block.select(self.chosen, start=block.start)


@dataclass
class Verdict:
    """Result of a check.

    Attributes:
        failure: description and size of an error in the output or the choices; None if there is none.
        gradient_failure: description and size of an error in the gradients; None if there is none.
        errors: largest relative error (see `relative_error`) of the output, dq, dk and dv.
        choices: number of compared choices.
        different: number of choices that are not the best by float64 scores.
        worst: largest difference between the best score and that of such a choice, relative to what rounding allows.
        largest_share: largest fraction of a head's choosing queries that chose the same chunk; None without choices.
    """

    failure: str | None = None
    gradient_failure: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    choices: int = 0
    different: int = 0
    worst: float = 0.0
    largest_share: float | None = None

    def record_error(self, name: str, error: float) -> None:
        """Record an error if it is the largest so far, or NaN."""
        largest = self.errors.get(name, 0.0)
        self.errors[name] = error if math.isnan(error) or error > largest else largest


def check(build: Builder, shape: Shape, draw: Draw, *, gradients: bool) -> Verdict:
    """Check each part of a contestant on new random inputs.

    Outputs and choices are checked for sampled rows with their whole context, in every batch row and head. Gradients
    are checked completely, for at most 4,096 tokens and two batch rows.

    Args:
        build: builder of the contestant.
        shape: the shape that will be timed.
        draw: function that draws inputs.
        gradients: True to check the gradients.
    """
    verdict = Verdict()
    for part in build(shape).parts:
        _check_sample(part, shape, draw, verdict)
    if gradients and verdict.failure is None:
        short = replace(shape, length=min(shape.length, MAX_GRADIENT_LENGTH), batch=min(shape.batch, 2))
        for part in build(short).parts:
            _check_gradients(part, short, draw, verdict)
    return verdict


def _check_sample(part: TimedPart, shape: Shape, draw: Draw, verdict: Verdict) -> None:
    q, k, v = draw(shape)
    with torch.no_grad():
        result = Result(q, k, v, *part.run(q, k, v))
        if result.chosen is not None and part.compare is not None:
            verdict.largest_share = largest_share(result.chosen // part.keys_per_choice)
        for start, end in sample_blocks(shape.length):
            for block in query_blocks(shape, start, end):
                _check_block(part, result, block, verdict)
                if verdict.failure is not None:
                    return


def _check_gradients(part: TimedPart, shape: Shape, draw: Draw, verdict: Verdict) -> None:
    q, k, v = inputs = draw(shape)
    for x in inputs:
        x.requires_grad_()
    result = Result(q, k, v, *part.run(q, k, v))
    grad = torch.randn_like(result.out)
    grads = torch.autograd.grad(result.out, inputs, grad)
    for block in query_blocks(shape, 0, shape.length):
        with torch.no_grad():
            _check_block(part, result, block, verdict)
        if verdict.failure is not None:
            return
        wide_inputs = block.inputs_float64(*inputs)
        for x in wide_inputs:
            x.requires_grad_()
        out = part.reference(*wide_inputs, result.choices(block), 0)
        expected = torch.autograd.grad(out, wide_inputs, block.select(grad, start=0).double())
        for name, actual, exact in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            _record_gradient_error(part, name, relative_error(block.select(actual, start=0), exact), verdict)


def _check_block(part: TimedPart, result: Result, block: QueryBlock, verdict: Verdict) -> None:
    q, k, v = block.inputs_float64(result.q, result.k, result.v)
    choices = result.choices(block)
    if choices is not None and part.compare is not None:
        comparison = part.compare(q, k, choices, block.start)
        verdict.choices += comparison.compared
        verdict.different += comparison.different
        verdict.worst = max(verdict.worst, comparison.worst)
        if comparison.wrong:  # an impossible choice may have no reference
            verdict.failure = (
                f"{comparison.wrong} of {comparison.compared} choices at {block.start}..{block.end - 1} are wrong: "
                f"{comparison.impossible} are impossible, others differ by up to {comparison.worst:.1e} times the "
                "rounding bound"
            )
            return
    expected = part.reference(q, k, v, choices, block.start)
    error = relative_error(block.select(result.out, start=block.start), expected)
    verdict.record_error("output", error)
    if not error <= part.limit:
        verdict.failure = f"{part.name} off by {error:.1e}, limit {part.limit:.0e}"


def _record_gradient_error(part: TimedPart, name: str, error: float, verdict: Verdict) -> None:
    verdict.record_error(name, error)
    if not error <= GRADIENT_LIMIT:
        label = name if part.name == "output" else f"{name} of {part.name}"
        verdict.gradient_failure = f"{label} off by {error:.1e}, limit {GRADIENT_LIMIT:.0e}"


def sample_blocks(length: int) -> list[tuple[int, int]]:
    """Return the ranges of samples: first and last rows, around the ends of chunks of 128 and 256, and random ones."""
    if length <= 6 * SAMPLE_SIZE:
        return [(0, length)]
    at_random = torch.randint(0, length - SAMPLE_SIZE, (2,)).tolist()
    starts = [0, 128 - SAMPLE_SIZE // 2, 256 - SAMPLE_SIZE // 2, *at_random, length - SAMPLE_SIZE]
    return [(start, start + SAMPLE_SIZE) for start in sorted({min(start, length - SAMPLE_SIZE) for start in starts})]


def query_blocks(shape: Shape, start: int, end: int) -> Iterator[QueryBlock]:
    """Divide batch rows and heads into blocks so that float64 scores of queries start .. end - 1 fit in memory."""
    ratio = shape.heads // shape.groups
    step = max(1, MAX_SCORE_BYTES // (8 * ratio * (end - start) * end))
    for row in range(shape.batch):
        for first in range(0, shape.groups, step):
            last = min(first + step, shape.groups)
            yield QueryBlock(row, start, end, shape.heads, slice(first * ratio, last * ratio), slice(first, last))


def relative_error(actual_bthd: Tensor, expected_bthd: Tensor) -> float:
    """Return the largest ||found - expected|| / ||expected|| over 256 positions of a head; NaN if any is NaN."""
    squares = [x.double().pow(2).sum(dim=(0, 3)) for x in (actual_bthd.double() - expected_bthd, expected_bthd)]
    error_norm, norm = (torch.stack([part.sum(0) for part in x_th.split(ERROR_ROWS)]).sqrt() for x_th in squares)
    # If the expected result is zero, there is no relative error, and the result must match exactly.
    error_nh = torch.where(error_norm == 0, 0.0, error_norm / norm)
    return math.nan if bool(error_nh.isnan().any()) else float(error_nh.max())


def largest_share(chunk_bthm: Tensor) -> float | None:
    """Return the largest fraction of a head's choosing queries with the same first chunk; the maximum over heads."""
    first_chunk_xt = chunk_bthm[..., 0].transpose(1, 2).flatten(0, 1)
    has_choice_xt = first_chunk_xt >= 0
    if not bool(has_choice_xt.any()):
        return None
    counts_xn = torch.zeros(len(first_chunk_xt), int(first_chunk_xt.max()) + 1, device=first_chunk_xt.device)
    counts_xn.scatter_add_(1, first_chunk_xt.clamp(min=0), has_choice_xt.float())
    return float((counts_xn.amax(1) / has_choice_xt.sum(1).clamp(min=1)).max())
