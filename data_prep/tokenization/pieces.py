"""Encoding of long texts in pieces: a tokenizer library needs up to 200 bytes of memory per byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE_CHARACTERS = 500_000
MAX_PIECE_BYTES = 4 << 20
"""Maximum number of bytes of a piece without a position to cut. Encoding it takes less than 1 GB, as measured."""

CONTEXT_CHARACTERS = 200
"""Number of characters on each side of a cut that are encoded together and separately for comparison."""

MAX_CUT_ATTEMPTS = 8
"""Maximum number of positions to try per pattern."""

CUT_PATTERNS = (re.compile(r"\n(?=\w)"), re.compile(r"(?<=\w)(?= \w)"))
"""Patterns after which tokenizers are likely to separate words: a line feed, and a word before a space."""

Encode = Callable[[list[str]], list[list[int]]]


class NoCutError(ValueError):
    """Error for a text that is too long to be encoded whole and has no position to cut."""


def encode_by_parts(encode: Encode, text: str) -> list[int]:
    """Encode a text of any length to the same ids as when it is encoded whole.

    A text is only cut where the surrounding text has the same ids when it is encoded in one piece and in two. At such a
    position, the tokenizer treats both sides independently and adds nothing at a beginning or an end.

    Args:
        encode: function that returns the ids of texts.
        text: text to encode.

    Raises:
        NoCutError: more than `MAX_PIECE_BYTES` have no such position.
    """
    return [token for piece in pieces(encode, text) for token in encode([piece])[0]]


def pieces(encode: Encode, text: str) -> Iterator[str]:
    """Yield parts of a text that can be encoded separately; see `encode_by_parts`."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = _find_cut(encode, text, start + PIECE_CHARACTERS)
        if end is None:
            break
        yield text[start:end]
        start = end
    remaining = text[start:]
    if len(remaining.encode()) > MAX_PIECE_BYTES:
        raise NoCutError(f"{len(remaining):,} characters without a place to split")
    yield remaining


def _find_cut(encode: Encode, text: str, start: int) -> int | None:
    for pattern in CUT_PATTERNS:
        matches = pattern.finditer(text, start, start + PIECE_CHARACTERS)
        for match, _ in zip(matches, range(MAX_CUT_ATTEMPTS), strict=False):
            cut = match.end()
            before, after = text[cut - CONTEXT_CHARACTERS : cut], text[cut : cut + CONTEXT_CHARACTERS]
            whole, left, right = encode([before + after, before, after])
            if whole == left + right:
                return cut
    return None
