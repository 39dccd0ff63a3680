"""Parser of the layer pattern: `"(top1_chunk*3,attention)*4"` gives one mixer name per layer.

Grammar: sequence = item ("," item)*;  item = (name | "(" sequence ")") ["*" repeats]. Whitespace is ignored.
"""

from __future__ import annotations

import re
from typing import NoReturn

from megatron_ext.utils.errors import UserError

MAX_LAYERS = 10_000
"""Limit above any real model. It stops a typo like `attention*1200000000` from exhausting memory."""

MAX_DEPTH = 20

_TOKEN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[(),*]")
_EXAMPLE = 'write it like "attention*12" or "(top1_chunk*3,attention)*4"'


def on_one_line(pattern: str) -> str:
    """Replace each run of spaces, tabs and line breaks in a layer pattern by one space, and strip both ends."""
    return re.sub(r"[ \t\r\n]+", " ", pattern).strip(" ")


def parse_pattern(pattern: str) -> list[str]:
    """Expand a layer pattern.

    Args:
        pattern: the value of `model.pattern`.

    Returns:
        Mixer name of each layer, first layer first. Names are not checked against the registry.

    Raises:
        UserError: the pattern is invalid. The message names the position and shows a valid example.
    """
    parser = _Parser(pattern)
    layers = parser.sequence(depth=0)
    if parser.token:
        parser.fail("expected ',' or '*' or the end")
    return layers


class _Parser:
    """Recursive-descent parser that holds the current token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.token = ""
        self.advance()

    def advance(self) -> None:
        """Move to the next token. At the end it is empty."""
        self.position += len(self.token)
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1
        if self.position == len(self.text):
            self.token = ""
            return
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            self.fail("unexpected character")
        self.token = match.group()

    def sequence(self, depth: int) -> list[str]:
        """Parse items separated by commas."""
        layers = self.item(depth)
        while self.token == ",":
            self.advance()
            layers += self.item(depth)
            self.limit(len(layers))
        return layers

    def item(self, depth: int) -> list[str]:
        """Parse a name or a group, with its repeats."""
        if self.token == "(":
            layers = self.group(depth + 1)
        elif self.token[:1].isalpha() or self.token[:1] == "_":
            layers = [self.token]
            self.advance()
        else:
            self.fail("expected a mixer's name or '('")
        return layers * self.repeats(len(layers))

    def group(self, depth: int) -> list[str]:
        """Parse `( sequence )`."""
        if depth > MAX_DEPTH:
            self.fail(f"brackets nested deeper than {MAX_DEPTH}")
        self.advance()
        layers = self.sequence(depth)
        if self.token != ")":
            self.fail("expected ',' or ')'")
        self.advance()
        return layers

    def repeats(self, length: int) -> int:
        """Parse `* number`. Return 1 if it is absent."""
        if self.token != "*":
            return 1
        self.advance()
        # A number of more than 9 digits is above the limit, and int() refuses very long ones.
        if not self.token.isdigit() or not self.token.strip("0"):
            self.fail("expected a number of repeats, 1 or more")
        count = int(self.token) if len(self.token) <= 9 else MAX_LAYERS + 1
        self.limit(length * count)
        self.advance()
        return count

    def limit(self, layers: int) -> None:
        """Refuse more than `MAX_LAYERS` layers."""
        if layers > MAX_LAYERS:
            self.fail(f"more than {MAX_LAYERS} layers")

    def fail(self, expected: str) -> NoReturn:
        """Raise an error that shows the position."""
        found = repr(self.text[self.position : self.position + 12]) if self.position < len(self.text) else "the end"
        problem = f"{self.text!r} cannot be read at position {self.position + 1} ({found}): {expected}"
        raise UserError("model.pattern", problem, _EXAMPLE)
