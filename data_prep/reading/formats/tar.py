"""WebDataset tars."""

from __future__ import annotations

from data_prep.reading.registry import register
from data_prep.reading.tars import read_tar

register(".tar")(read_tar)
