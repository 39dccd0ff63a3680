"""Unicode normalization in linear time, whatever the text.

The standard library puts combining marks in order by exchanging neighbours: 200,000 marks of two classes in turn take
half a minute. Long runs of marks are put in order here first, by a stable sort, which gives the same text (Unicode
Standard Annex 15, canonical ordering).
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import Literal

LONGEST_RUN = 30
"""Marks in a row that are left to the standard library: no writing has as many (Annex 15, Stream-Safe Text Format)."""

_FIRST, _LAST = 0x300, 0x1FFFF
"""Code points between which all combining marks lie."""


def normalized(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """The same as `unicodedata.normalize(form, text)`."""
    if text.isascii():
        return text
    ordered = _long_runs().sub(lambda run: _in_order(run[0], form), text)
    return unicodedata.normalize(form, ordered)


def _in_order(marks: str, form: Literal["NFC", "NFKC"]) -> str:
    decomposition: Literal["NFD", "NFKD"] = "NFD" if form == "NFC" else "NFKD"
    parts = {mark: unicodedata.normalize(decomposition, mark) for mark in set(marks)}
    return "".join(sorted("".join(parts[mark] for mark in marks), key=unicodedata.combining))


@cache
def _long_runs() -> re.Pattern[str]:
    """Runs of more than `LONGEST_RUN` characters that are combining marks, or decompose into nothing else."""
    marks = "".join(character for character in map(chr, range(_FIRST, _LAST + 1)) if is_mark(character))
    return re.compile(f"[{re.escape(marks)}]{{{LONGEST_RUN + 1},}}")


def is_mark(character: str) -> bool:
    """Whether a character goes before or behind others when they are put in canonical order."""
    return all(map(unicodedata.combining, unicodedata.normalize("NFD", character)))
