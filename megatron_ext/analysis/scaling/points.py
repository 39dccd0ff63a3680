"""Points of a scaling law: trained models of different sizes and numbers of tokens, from a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_ext.analysis.run_files import FloatArray, IntArray
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError

REQUIRED_COLUMNS = ("params", "tokens", "loss")
MIXER, TEST_LOSS = "mixer", "test_loss"
DOMAIN_LOSS = f"{TEST_LOSS} "
"""Prefix of columns with the loss on one test domain, before its name."""


@dataclass(frozen=True)
class Points:
    """Points of a law, one per trained model.

    Attributes:
        params: float64 [n], number of parameters.
        tokens: float64 [n], number of training tokens.
        losses: float64 [n], final loss in nats per token.
        test_losses: float64 [n], final loss on out-of-domain text in nats per token; None: unknown.
        domain_losses: float64 [n] by test domain, final losses in nats per token; empty: unknown.
    """

    params: FloatArray
    tokens: FloatArray
    losses: FloatArray
    test_losses: FloatArray | None = None
    domain_losses: Mapping[str, FloatArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.losses)

    def take(self, selection: IntArray | np.ndarray) -> Points:
        """Select points by indices or by a boolean mask."""
        test_losses = None if self.test_losses is None else self.test_losses[selection]
        domain_losses = {domain: losses[selection] for domain, losses in self.domain_losses.items()}
        values = (self.params[selection], self.tokens[selection], self.losses[selection])
        return Points(*values, test_losses, domain_losses)


def read_points(path: Path) -> dict[str, Points]:
    """Read points from a CSV file with the columns params, tokens and loss, and optionally mixer and test_loss.

    A column `test_loss DOMAIN` has the test loss on one domain. Other columns are ignored.

    Returns:
        Points by mixer, in the order of first occurrence. Without a column mixer, all points are under an empty name.

    Raises:
        UserError: the file cannot be read, lacks a column or has no points, or a value is not a number above 0.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            _check_columns(path, columns)
            rows = [(f"{path}:{reader.line_num}", row) for row in reader]
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", "give a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(str(path), f"is not CSV ({error})", "give a CSV file in UTF-8") from None
    if not rows:
        raise UserError(str(path), "contains no points", "give one line per trained model")
    optional_columns = [name for name in columns if name == TEST_LOSS or name.startswith(DOMAIN_LOSS)]
    number_columns = [*REQUIRED_COLUMNS, *optional_columns]
    values_by_mixer: dict[str, list[list[float]]] = {}
    for where, row in rows:
        mixer = (row.get(MIXER) or "").strip()
        if MIXER in columns and not mixer:
            raise UserError(where, f"{MIXER} is empty", "give the mixer of every point, or remove the column")
        values_by_mixer.setdefault(mixer, []).append(
            [_parse_number(where, name, row.get(name)) for name in number_columns]
        )
    return {mixer: _to_points(optional_columns, np.array(values).T) for mixer, values in values_by_mixer.items()}


def _to_points(optional_columns: Sequence[str], values: FloatArray) -> Points:
    """Return points from the values [columns, n] of the required and the optional columns."""
    params, tokens, losses, *optional = values
    by_column = dict(zip(optional_columns, optional, strict=True))
    test_losses = by_column.pop(TEST_LOSS, None)
    return Points(
        params, tokens, losses, test_losses, {name.removeprefix(DOMAIN_LOSS): own for name, own in by_column.items()}
    )


def _check_columns(path: Path, columns: list[str]) -> None:
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        present = ", ".join(columns) or "none"
        hint = f"name the columns {', '.join(REQUIRED_COLUMNS)} (and maybe {MIXER}, {TEST_LOSS}) in the first line"
        raise UserError(str(path), f"has no column {', '.join(missing)}; its columns are {present}", hint)


def _parse_number(where: str, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(where, f"{name} is {text!r}, not a number above 0", "fix the value or remove the line")
    return value
