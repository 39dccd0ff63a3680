"""Text from files and options, made safe for a terminal: control and bidirectional characters become escapes."""

from __future__ import annotations

import unicodedata

_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder what stands beside them on a screen."""

_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories of control characters, lone surrogates, and line and paragraph separators."""


def is_control(character: str) -> bool:
    """Whether a character moves a cursor, ends a line, reorders its neighbours or cannot be encoded."""
    return unicodedata.category(character) in _CATEGORIES or character in _BIDI


def control_characters(text: str) -> str:
    """The control characters of a text, in their order; empty where there are none."""
    return "" if text.isprintable() else "".join(filter(is_control, text))


def printable(text: str, keep: str = "") -> str:
    r"""A text with each control character as its Python escape: an ANSI sequence shows as `\x1b[31m`.

    Args:
        text: from a file, an option or a machine.
        keep: characters that stay, such as a newline in output of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode() if is_control(character) and character not in keep else character
        for character in text
    )
