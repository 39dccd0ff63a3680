"""Parquet."""

from __future__ import annotations

from data_prep.reading.registry import register
from data_prep.reading.tables import read_table

register(".parquet")(read_table)
