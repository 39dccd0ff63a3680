"""Properties of each token of a vocabulary that decide its classes: kind of text, word boundaries, brackets."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORD, DIGITS, PUNCTUATION, SPACE, END_OF_DOCUMENT, OTHER = range(6)
"""Values of `TokenTable.kinds`."""

NO_LETTER, LETTER, UNKNOWN = range(3)
"""Values of `TokenTable.ends`. UNKNOWN: the token ends with a part of a character."""

RARE, MEDIUM, FREQUENT = range(3)
"""Values of `TokenTable.frequencies`."""

FREQUENT_SHARE, RARE_SHARE = 0.5, 0.1
"""Approximate shares of the training text that frequent and rare tokens make up."""

BRACKETS = ("()", "[]", "{}")
"""Types of brackets. Angle brackets are left out, because most of them are comparisons or arrows."""

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_APOSTROPHES = "'\N{RIGHT SINGLE QUOTATION MARK}"
_OPENING = {pair[0]: index for index, pair in enumerate(BRACKETS)}
_CLOSING = {pair[1]: index for index, pair in enumerate(BRACKETS)}


@dataclass(frozen=True)
class TokenTable:
    """Properties of the V tokens of a vocabulary.

    Attributes:
        kinds: int8 [V], WORD (contains a letter), DIGITS (a digit, no letter), PUNCTUATION (a mark or symbol, neither
            letter nor digit), SPACE (white space only), END_OF_DOCUMENT, or OTHER: special tokens, and parts of
            characters.
        joins_left: bool [V], True if the text begins with a letter, or with an apostrophe before a letter.
        ends: int8 [V], whether the text ends with a letter.
        closes: int8 [V], index in BRACKETS of the first closing bracket that is not opened in the token; -1: none.
        closing: int16 [3, V], number of closing brackets of each type that are not opened in the token.
        opening: int16 [3, V], number of opening brackets of each type that are not closed in the token.
        frequencies: int8 [V]; None: the training counts are unknown.
    """

    kinds: npt.NDArray[np.int8]
    joins_left: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int8]
    closes: npt.NDArray[np.int8]
    closing: npt.NDArray[np.int16]
    opening: npt.NDArray[np.int16]
    frequencies: npt.NDArray[np.int8] | None = None

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.kinds)


def token_table(
    texts: Sequence[str],
    special: Collection[int],
    end_id: int | None,
    counts: npt.NDArray[np.int64] | None = None,
) -> TokenTable:
    """Compute the properties of all tokens.

    Args:
        texts: text of each token, as in the middle of a text; U+FFFD stands for a part of a character.
        special: ids of tokens that are not text.
        end_id: id of the end-of-document token; None: unknown.
        counts: int64 [V], occurrences in the training text; None: unknown.
    """
    size = len(texts)
    kinds, ends = np.full(size, OTHER, dtype=np.int8), np.full(size, NO_LETTER, dtype=np.int8)
    joins_left, closes = np.zeros(size, dtype=np.bool_), np.full(size, -1, dtype=np.int8)
    closing, opening = np.zeros((2, len(BRACKETS), size), dtype=np.int16)
    for token, text in enumerate(texts):
        if token == end_id:
            kinds[token] = END_OF_DOCUMENT
        elif text and token not in special:
            kinds[token], joins_left[token], ends[token] = _kind(text), _joins_left(text), _end(text)
            closes[token] = _count_brackets(text, closing[:, token], opening[:, token])
    frequencies = None if counts is None else frequency_groups(counts)
    return TokenTable(kinds, joins_left, ends, closes, closing, opening, frequencies)


def frequency_groups(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Return RARE, MEDIUM or FREQUENT for each token.

    Tokens are taken from the most to the least frequent. Frequent are those up to the one with which they first make up
    `FREQUENT_SHARE` of the text. Rare are those after the one with which they first make up 1 - `RARE_SHARE`. Tokens
    with equal counts are in the same group.

    Args:
        counts: int64 [V], occurrences, not all 0.
    """
    descending = np.sort(counts)[::-1]
    covered = np.cumsum(descending)
    frequent, rare = (
        descending[np.searchsorted(covered, share * covered[-1])] for share in (FREQUENT_SHARE, 1 - RARE_SHARE)
    )
    return np.where(counts >= frequent, FREQUENT, np.where(counts < rare, RARE, MEDIUM)).astype(np.int8)


def _kind(text: str) -> int:
    if _UNREADABLE in text:
        return OTHER
    groups = {unicodedata.category(character)[0] for character in text}
    for group, kind in (("L", WORD), ("M", WORD), ("N", DIGITS), ("P", PUNCTUATION), ("S", PUNCTUATION)):
        if group in groups:
            return kind
    return SPACE


def _is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LM"


def _joins_left(text: str) -> bool:
    first = text[1:] if text[0] in _APOSTROPHES else text
    return bool(first) and _is_letter(first[0])


def _end(text: str) -> int:
    if text[-1] == _UNREADABLE:
        return UNKNOWN
    return LETTER if _is_letter(text[-1]) else NO_LETTER


def _count_brackets(text: str, closing: npt.NDArray[np.int16], opening: npt.NDArray[np.int16]) -> int:
    """Add a token's unmatched brackets to the counts by type, and return the type of its first closing one, or -1."""
    first = -1
    for character in text:
        if (opened := _OPENING.get(character)) is not None:
            opening[opened] += 1
        elif (closed := _CLOSING.get(character)) is not None:
            if opening[closed]:
                opening[closed] -= 1
            else:
                closing[closed] += 1
                first = closed if first < 0 else first
    return first
