"""Runs that skip a damaged shard: messages, records and samples."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_ext.data import skipped_shards
from megatron_ext.data.verify import Damage

ONE = Damage("train/C4/000001.tar", 1200, "data/train/C4/000001.tar is missing")
TWO = Damage("train/C4/000007.tar", 34, "data/train/C4/000007.tar is truncated: expected 9 bytes, found 8")
SAMPLES = cast(Any, SimpleNamespace(num_windows=5000, lost_windows=3))


def read_records(folder: Path) -> list[tuple[int, list[str]]]:
    lines = (folder / skipped_shards.SKIPPED).read_text().splitlines()
    return [(line["step"], [shard["shard"] for shard in line["shards"]]) for line in map(json.loads, lines)]


def test_warnings_name_every_shard_and_the_total() -> None:
    assert list(skipped_shards.warnings([ONE, TWO], SAMPLES)) == [
        "selectron: warning: data/train/C4/000001.tar is missing: skipped (1,200 tokens)",
        "selectron: warning: data/train/C4/000007.tar is truncated: expected 9 bytes, found 8: skipped (34 tokens)",
        "selectron: warning: data.on_damaged skip: the run skips 1,234 tokens; 4,997 of 5,000 samples per epoch "
        "remain and replace the others",
    ]
    assert list(skipped_shards.warnings([], SAMPLES)) == []


def test_record_of_skipped_shards(tmp_path: Path) -> None:
    skipped_shards.record_skipped(tmp_path, [], SAMPLES, 0)
    assert not (tmp_path / skipped_shards.SKIPPED).exists()
    skipped_shards.record_skipped(tmp_path, [ONE], SAMPLES, 5)
    (line,) = (tmp_path / skipped_shards.SKIPPED).read_text().splitlines()
    assert json.loads(line) == {
        "step": 5,
        "tokens": 1200,
        "samples_an_epoch": 4997,
        "of_samples": 5000,
        "shards": [{"shard": ONE.shard, "tokens": 1200, "problem": ONE.problem}],
    }
    skipped_shards.record_skipped(tmp_path, [ONE], SAMPLES, 10)  # unchanged, so no new record
    assert read_records(tmp_path) == [(5, [ONE.shard])]
    skipped_shards.record_skipped(tmp_path, [ONE, TWO], SAMPLES, 20)
    skipped_shards.record_skipped(tmp_path, [], SAMPLES, 30)  # both shards were replaced by good copies
    assert read_records(tmp_path) == [(5, [ONE.shard]), (20, [ONE.shard, TWO.shard]), (30, [])]


@pytest.mark.parametrize(("damages", "expected"), [([], [(5, [ONE.shard]), (8, [])]), ([ONE], [(5, [ONE.shard])])])
def test_records_after_the_resumed_step_are_dropped(tmp_path: Path, damages: list[Damage], expected: Any) -> None:
    skipped_shards.record_skipped(tmp_path, [ONE], SAMPLES, 5)
    skipped_shards.record_skipped(tmp_path, [ONE, TWO], SAMPLES, 20)
    skipped_shards.record_skipped(tmp_path, damages, SAMPLES, 8)
    assert read_records(tmp_path) == expected
