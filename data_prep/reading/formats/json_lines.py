"""JSON lines, plain or compressed."""

from __future__ import annotations

from data_prep.reading.records import read_records
from data_prep.reading.registry import register

register(".jsonl", ".jsonl.gz", ".jsonl.zst")(read_records)
