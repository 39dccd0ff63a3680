"""Unicode normalization in linear time for any text.

The standard library orders combining marks by exchanging neighbours: 200,000 alternating marks of two classes take half
a minute. Long runs of marks are first ordered here by a stable sort, which gives the same text (Unicode Standard Annex
15, canonical ordering).
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import Literal

MAX_RUN_LENGTH = 30
"""Run length up to which marks are left to the standard library. No script needs more (Annex 15, Stream-Safe Text)."""

_FIRST, _LAST = 0x300, 0x1FFFF
"""Range of code points that contains all combining marks."""


def normalize(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """Return `unicodedata.normalize(form, text)`, in linear time."""
    if text.isascii():
        return text
    ordered = _long_runs().sub(lambda run: _order_marks(run[0], form), text)
    return unicodedata.normalize(form, ordered)


def _order_marks(marks: str, form: Literal["NFC", "NFKC"]) -> str:
    decomposition: Literal["NFD", "NFKD"] = "NFD" if form == "NFC" else "NFKD"
    parts = {mark: unicodedata.normalize(decomposition, mark) for mark in set(marks)}
    return "".join(sorted("".join(parts[mark] for mark in marks), key=unicodedata.combining))


@cache
def _long_runs() -> re.Pattern[str]:
    """Return the pattern of runs of over `MAX_RUN_LENGTH` characters that are, or decompose into, combining marks."""
    marks = "".join(character for character in map(chr, range(_FIRST, _LAST + 1)) if is_mark(character))
    return re.compile(f"[{re.escape(marks)}]{{{MAX_RUN_LENGTH + 1},}}")


def is_mark(character: str) -> bool:
    """Return True if canonical ordering may move the character."""
    return all(map(unicodedata.combining, unicodedata.normalize("NFD", character)))
