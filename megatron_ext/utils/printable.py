"""Escaping of control and bidirectional characters, to make text from files and options safe for a terminal."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the display order of their neighbours."""

_CURSOR_UP = "\x1b[A"
"""Escape sequence that progress bars print if there are several."""

_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories of control characters, lone surrogates, and line and paragraph separators."""


def is_control(character: str) -> bool:
    """Return whether a character moves the cursor, ends a line, reorders its neighbours or cannot be encoded."""
    return unicodedata.category(character) in _CATEGORIES or character in _BIDI


def control_characters(text: str) -> str:
    """Return the control characters of a text in their order; empty if there are none."""
    return "" if text.isprintable() else "".join(filter(is_control, text))


def printable(text: str, keep: str = "") -> str:
    r"""Replace each control character by its Python escape: an ANSI sequence becomes `\x1b[31m`.

    Args:
        text: text from a file, an option or a machine.
        keep: characters to keep, such as the newline in multi-line output.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode() if is_control(character) and character not in keep else character
        for character in text
    )


class EscapedOutput:
    """Text stream that escapes control characters, except line ends, tabs and the sequences of progress bars.

    Names and messages of runs, files or models then cannot move the cursor or set the terminal's title.

    Args:
        stream: underlying stream; all attributes but the write methods are its own.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, and return its length."""
        self._stream.write(_CURSOR_UP.join(printable(part, keep="\n\r\t") for part in text.split(_CURSOR_UP)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the underlying stream."""
        return getattr(self._stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Context manager that replaces `sys.stdout` and `sys.stderr` by `EscapedOutput`."""
    out, err = EscapedOutput(sys.stdout), EscapedOutput(sys.stderr)
    with redirect_stdout(cast("IO[str]", out)), redirect_stderr(cast("IO[str]", err)):
        yield


def text_output() -> IO[str]:
    """Return standard output for verbatim text: unescaped if it is a file or a pipe, escaped on a terminal."""
    out = sys.stdout
    return out._stream if isinstance(out, EscapedOutput) and not out.isatty() else out
