"""Scoring functions of generated answers, from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Sequence

INTEGER = re.compile(r"\d+")


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Return the fraction of the references that the answer contains, ignoring case (RULER's `string_match_all`)."""
    folded = answer.casefold()
    return sum(reference.casefold() in folded for reference in references) / len(references)


def first_integer(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the first integer in the answer equals the only reference (passkey retrieval), else 0."""
    (reference,) = references
    found = INTEGER.search(answer)
    return float(found is not None and int(found.group()) == int(reference))


def integer_is_over(answer: str) -> bool:
    """Return True if the first integer is complete, so that more text cannot change the score."""
    return re.search(r"\d\D", answer) is not None
