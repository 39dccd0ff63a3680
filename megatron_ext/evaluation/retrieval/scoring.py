"""Scores of answers, from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Sequence

INTEGER = re.compile(r"\d+")


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Fraction of the references that stand somewhere in the answer, in whatever case: RULER's `string_match_all`."""
    folded = answer.casefold()
    return sum(reference.casefold() in folded for reference in references) / len(references)


def first_integer(answer: str, references: Sequence[str]) -> float:
    """1 if the first integer in the answer is the one reference, as passkey is scored; else 0."""
    (reference,) = references
    found = INTEGER.search(answer)
    return float(found is not None and int(found.group()) == int(reference))


def integer_is_over(answer: str) -> bool:
    """Whether the first integer stands there whole, so that whatever follows changes nothing."""
    return re.search(r"\d\D", answer) is not None
