"""Numbers as a page shows them, and by what a reader sorts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MINUS = "\u2212"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: shown.
        value: that it is sorted by; None: by its text, or last where it is a dash.
        note: shown small beside it.
        is_text: whether it is words, not a number.
    """

    text: str
    value: float | None = None
    note: str = ""
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a page; the first cell of a row names it.

    Attributes:
        caption: what the numbers are.
        columns: names.
        rows: cells, as many as there are columns.
        marked: number of the row that stands out.
        below: whether notes stand below what they are of, for tables of many columns.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    marked: int | None = None
    below: bool = False

    def is_text(self, column: int) -> bool:
        """Whether a column is of words: it stands at the left, and its name does."""
        known = [row[column] for row in self.rows if row[column] != NOTHING]
        return bool(known) and all(cell.is_text for cell in known)


NOTHING = Cell("\u2013")


def text(words: str, note: str = "") -> Cell:
    """A cell of words."""
    return Cell(words, note=note, is_text=True)


def number(value: float) -> Cell:
    """A loss, in nats a token, or another number of its size."""
    return NOTHING if math.isnan(value) else Cell(f"{value:.4f}".replace("-", MINUS), value)


def signed(value: float) -> Cell:
    """A difference of losses."""
    return Cell(f"{value:+.4f}".replace("-", MINUS), value)


def count(value: int) -> Cell:
    """A whole number, in groups of three digits."""
    return Cell(f"{value:,}".replace(",", "\u202f"), value)
