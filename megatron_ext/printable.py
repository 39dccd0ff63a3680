"""Text from files and options, made safe for a terminal: control and bidirectional characters become escapes."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder what stands beside them on a screen."""

_CURSOR_UP = "\x1b[A"
"""What progress bars print when there are several."""

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


class EscapedOutput:
    """A text stream that shows control characters as escapes, but for line ends, tabs and what progress bars need.

    What a run, a file or a model is called or says then moves no cursor and sets no title, whoever prints it.

    Args:
        stream: where the text goes; everything but writing is its own.
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
        """Everything else of the stream."""
        return getattr(self._stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Within it, `sys.stdout` and `sys.stderr` are `EscapedOutput`."""
    out, err = EscapedOutput(sys.stdout), EscapedOutput(sys.stderr)
    with redirect_stdout(cast("IO[str]", out)), redirect_stderr(cast("IO[str]", err)):
        yield


def text_output() -> IO[str]:
    """Standard output for text that is asked for as it is: unchanged into a file or a pipe, escaped on a screen."""
    out = sys.stdout
    return out._stream if isinstance(out, EscapedOutput) and not out.isatty() else out
