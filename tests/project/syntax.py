"""Walk over the statements of Python files, for tests that look at every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(path: Path) -> Iterator[ast.AST]:
    """Yield the statements of a file at any depth, in functions and classes, too.

    Expressions are not entered, which makes this several times as fast as `ast.walk`.
    """
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.expr):
            pending += [inner for block in _BLOCKS for inner in getattr(node, block, ())]
