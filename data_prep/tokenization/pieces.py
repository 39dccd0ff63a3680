"""Encoding of long texts in pieces: a tokenizer library needs up to 200 bytes of memory per byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE_CHARACTERS = 500_000
WHOLE_BYTES = 4 << 20
"""Maximum bytes of a piece, if no place to cut was found: below 1 GB of memory as measured."""

WINDOW = 200
"""Characters on both sides of a cut that are encoded together and separately for comparison."""

TRIES = 8
PLACES = (re.compile(r"\n(?=\w)"), re.compile(r"(?<=\w)(?= \w)"))
"""Places where tokenizers are likely to separate words: after a line, before a space."""

Encode = Callable[[list[str]], list[list[int]]]


class UnbrokenError(ValueError):
    """A text that is too long to be encoded whole and has no place to cut it."""


def encode_in_pieces(encode: Encode, text: str) -> list[int]:
    """Encode a text of any length to the same ids as when it is encoded whole.

    A text is only cut where the text around the cut has the same ids in one piece and in two. There, the tokenizer
    treats both sides independently and adds nothing at a beginning or an end.

    Args:
        encode: function that returns the ids of texts.
        text: text to encode.

    Raises:
        UnbrokenError: there is no such place in more than `WHOLE_BYTES`.
    """
    return [token for piece in pieces(encode, text) for token in encode([piece])[0]]


def pieces(encode: Encode, text: str) -> Iterator[str]:
    """Yield parts of a text that can be encoded separately; see `encode_in_pieces`."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = _find_cut(encode, text, start + PIECE_CHARACTERS)
        if end is None:
            break
        yield text[start:end]
        start = end
    rest = text[start:]
    if len(rest.encode()) > WHOLE_BYTES:
        raise UnbrokenError(f"{len(rest):,} characters without a place to split")
    yield rest


def _find_cut(encode: Encode, text: str, start: int) -> int | None:
    for place in PLACES:
        found = place.finditer(text, start, start + PIECE_CHARACTERS)
        for match, _ in zip(found, range(TRIES), strict=False):
            before, after = text[match.end() - WINDOW : match.end()], text[match.end() : match.end() + WINDOW]
            whole, left, right = encode([before + after, before, after])
            if whole == left + right:
                return match.end()
    return None
