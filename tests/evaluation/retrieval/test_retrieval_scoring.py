"""Scores of answers and confidence intervals of means, compared with handmade and published cases."""

from __future__ import annotations

import pytest

from megatron_ext.evaluation.retrieval.results import wilson_interval
from megatron_ext.evaluation.retrieval.scoring import (
    first_integer,
    integer_is_over,
    string_match_all,
)


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        (" 1234567.", ["1234567"], 1.0),
        ("It is 12345678", ["1234567"], 1.0),  # a substring match counts, as in RULER
        ("ABCDE, fghij", ["abcde", "FGHIJ", "KLMNO", "PQRST"], 0.5),
        ("STRASSE", ["straße"], 1.0),
        ("", ["x"], 0.0),
    ],
)
def test_references_are_looked_for_anywhere(answer: str, references: list[str], score: float) -> None:
    assert string_match_all(answer, references) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [(" 4217.", 1.0), ("04217", 1.0), ("is 4217 or 9", 1.0), ("9 or 4217", 0.0), ("42170", 0.0), ("none", 0.0)],
)
def test_the_first_integer_counts(answer: str, score: float) -> None:
    assert first_integer(answer, ["4217"]) == score


def test_an_integer_is_over_with_what_is_none() -> None:
    assert [integer_is_over(text) for text in ("", " is ", " 42", " 42.", "42 7")] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("right", "samples", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_intervals_are_those_of_newcombe_1998(right: int, samples: int, low: float, high: float) -> None:
    """Compare with table I, method 3 of Newcombe, Statistics in Medicine 17, 857-872."""
    assert wilson_interval(right / samples, samples) == pytest.approx((low, high), abs=5e-5)


def test_intervals_stay_within_0_and_1() -> None:
    assert wilson_interval(1.0, 5)[1] == 1.0
    assert wilson_interval(0.0, 1)[0] == 0.0
