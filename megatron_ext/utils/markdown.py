"""Building blocks of reports: Markdown tables, CSV cells, number formats, and atomic JSON and Markdown files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.printable import printable

_FORMULA_PREFIXES = tuple("=+-@\t\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]inf")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    White space in a cell becomes single blanks, as a line break would end its row. Control characters are escaped.
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(map(_cell, cells)) + " |" for cells in lines]


def _cell(text: str) -> str:
    return printable(" ".join(text.split())).replace("|", "\\|")


def csv_row(cells: Iterable[Any]) -> list[Any]:
    """Return the cells of a CSV row; text that a spreadsheet would interpret as a formula gets a leading apostrophe."""
    return [_csv_text(cell) if isinstance(cell, str) else cell for cell in cells]


def _csv_text(text: str) -> str:
    if text[:1] in _FORMULA_PREFIXES and not _NUMBER.fullmatch(text):
        text = f"'{text}"
    return printable(text)


def format_number(x: float) -> str:
    """Format a number with three significant digits, but all digits before the decimal point."""
    if x == 0 or not math.isfinite(x):
        return str(x)
    return f"{x:.{max(0, 2 - math.floor(math.log10(abs(x))))}f}"


def replace_nonfinite(x: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by strings, in nested dictionaries."""
    if isinstance(x, dict):
        return {key: replace_nonfinite(value) for key, value in x.items()}
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def write_report(folder: Path, stem: str, numbers: dict[str, Any], text: str) -> None:
    """Write a report's STEM.json and STEM.md, each atomically."""
    write_atomically(folder / f"{stem}.json", (json.dumps(numbers, indent=1) + "\n").encode())
    write_atomically(folder / f"{stem}.md", text.encode())
