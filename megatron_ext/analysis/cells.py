"""Table cells of a report page: displayed text and sort value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MINUS = "\u2212"


@dataclass(frozen=True)
class Cell:
    """Cell of a table.

    Attributes:
        text: displayed text.
        value: sort value; None to sort the cell by its text, or last if it is a dash.
        note: additional text in small print.
        is_text: True if the cell contains words instead of a number.
    """

    text: str
    value: float | None = None
    note: str = ""
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    """Table of a page; the first cell of each row is the row's header.

    Attributes:
        caption: description of the numbers.
        columns: column names.
        rows: rows with one cell per column.
        highlighted: index of a highlighted row, or None.
        notes_below: True to place notes below their cell's text instead of beside it, for tables with many columns.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    highlighted: int | None = None
    notes_below: bool = False

    def is_text(self, column: int) -> bool:
        """Return True if a column contains words, so that it is left-aligned with its name."""
        known = [row[column] for row in self.rows if row[column] != NOTHING]
        return bool(known) and all(cell.is_text for cell in known)


NOTHING = Cell("\u2013")


def text(words: str, note: str = "") -> Cell:
    """Return a cell of words."""
    return Cell(words, note=note, is_text=True)


def number(value: float) -> Cell:
    """Format a loss in nats per token, or another number of that magnitude; NaN becomes a dash."""
    return NOTHING if math.isnan(value) else Cell(f"{value:.4f}".replace("-", MINUS), value)


def signed(value: float) -> Cell:
    """Format a difference of losses with its sign."""
    return Cell(f"{value:+.4f}".replace("-", MINUS), value)


def decimal(value: float) -> Cell:
    """Format a number with two decimals."""
    return Cell(f"{value:.2f}", value)


def count(value: int) -> Cell:
    """Format an integer in groups of three digits."""
    return Cell(f"{value:,}".replace(",", "\u202f"), value)
