"""Reports: Markdown tables that parse back into their cells, and numbers with three digits."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from megatron_ext.utils import markdown


def cells(text: str) -> list[list[str]]:
    """Parse a table with CommonMark and GitHub's table extension, row by row."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert tokens[0].type == "table_open"
    rows: list[list[str]] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(token.content)
    return rows


def test_table_cells() -> None:
    lines = markdown.table(("op", "said"), [("a|b", "fails:\n  no\tmemory"), ("", "1.00")])
    assert len(lines) == 4
    assert cells("\n".join(lines)) == [["op", "said"], ["a|b", "fails: no memory"], ["", "1.00"]]


@pytest.mark.parametrize(
    ("x", "expected"), [(0.0, "0.0"), (0.0123456, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (4321.6, "4322")]
)
def test_three_digits(x: float, expected: str) -> None:
    assert markdown.format_number(x) == expected
