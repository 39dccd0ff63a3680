"""Shards that failed during reading: records, messages, and removal of records."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from data_prep.manifest import Manifest
from megatron_ext.data.failed import (
    FAILED_FOLDER_NAME,
    DamagedShard,
    read_failed,
    record_failures,
    remove_failed_records,
)
from megatron_ext.utils.errors import UserError


def _error(shard: str) -> DamagedShard:
    return DamagedShard(f"data/{shard}", "is truncated: found 8 bytes", "copy it again", shard)


def _shard(manifest: Manifest, split: str) -> str:
    return manifest.select(split)[0].shards[0].file


AGAIN = "again with --resume=auto"


@pytest.mark.parametrize(
    ("split", "skip_damaged", "message"),
    [
        ("train", False, f"then start {AGAIN}, or skip the shard with --resume=auto data.on_damaged=skip"),
        ("train", True, f"or just start {AGAIN}: a shard that is still damaged is skipped"),
        ("test", True, f"then start {AGAIN}"),
    ],
)
def test_hint_describes_the_restart(
    manifest: Manifest, tmp_path: Path, split: str, skip_damaged: bool, message: str
) -> None:
    shard = _shard(manifest, split)
    with pytest.raises(UserError) as caught, record_failures(tmp_path, manifest, skip_damaged=skip_damaged):
        raise _error(shard)
    assert str(caught.value).startswith(f"data/{shard}: is truncated: found 8 bytes; copy it again, {message}")
    assert read_failed(tmp_path) == {shard}
    (note,) = (tmp_path / FAILED_FOLDER_NAME).iterdir()
    assert note.read_text() == f"data/{shard}: is truncated: found 8 bytes\n"


def test_other_errors_are_not_recorded(manifest: Manifest, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"^data.cache_dir: is full; make room$"),
        record_failures(tmp_path, manifest, skip_damaged=True),
    ):
        raise UserError("data.cache_dir", "is full", "make room")
    assert read_failed(tmp_path) == set()


def test_no_restart_hint_without_a_record(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / FAILED_FOLDER_NAME).write_text("in the way")
    error = _error(_shard(manifest, "train"))
    with pytest.raises(DamagedShard) as caught, record_failures(tmp_path, manifest, skip_damaged=True):
        raise error
    assert caught.value is error
    assert read_failed(tmp_path) == set()


def test_records_of_verified_shards_are_removed(manifest: Manifest, tmp_path: Path) -> None:
    one, other = (shard.file for shard in manifest.select("train")[0].shards[:2])
    remove_failed_records(tmp_path, ())
    for shard in (one, other, one):
        with pytest.raises(UserError), record_failures(tmp_path, manifest, skip_damaged=True):
            raise _error(shard)
    remove_failed_records(tmp_path, {other})
    assert read_failed(tmp_path) == {other}


def test_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(_error("train/C4/000000.tar")))
    assert (str(error), error.shard) == (
        "data/train/C4/000000.tar: is truncated: found 8 bytes; copy it again",
        "train/C4/000000.tar",
    )
