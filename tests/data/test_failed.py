"""Shards that failed during reading: records, messages, and removal of records."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from data_prep.manifest import Manifest
from megatron_ext.data.failed import NOTES, DamagedShard, forget_failed, noting, read_failed
from megatron_ext.utils.errors import UserError


def _error(shard: str) -> DamagedShard:
    return DamagedShard(f"data/{shard}", "is truncated: found 8 bytes", "copy it again", shard)


def _shard(manifest: Manifest, split: str) -> str:
    return manifest.select(split)[0].shards[0].file


AGAIN = "again with --resume=auto"


@pytest.mark.parametrize(
    ("split", "skips", "said"),
    [
        ("train", False, f"then start {AGAIN}, or skip the shard with --resume=auto data.on_damaged=skip"),
        ("train", True, f"or just start {AGAIN}: a shard that is still damaged is skipped"),
        ("test", True, f"then start {AGAIN}"),
    ],
)
def test_what_the_next_start_does_is_said(
    manifest: Manifest, tmp_path: Path, split: str, skips: bool, said: str
) -> None:
    shard = _shard(manifest, split)
    with pytest.raises(UserError) as caught, noting(tmp_path, manifest, skips=skips):
        raise _error(shard)
    assert str(caught.value).startswith(f"data/{shard}: is truncated: found 8 bytes; copy it again, {said}")
    assert read_failed(tmp_path) == {shard}
    (note,) = (tmp_path / NOTES).iterdir()
    assert note.read_text() == f"data/{shard}: is truncated: found 8 bytes\n"


def test_other_errors_are_nobodys_shard(manifest: Manifest, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"^data.cache_dir: is full; make room$"),
        noting(tmp_path, manifest, skips=True),
    ):
        raise UserError("data.cache_dir", "is full", "make room")
    assert read_failed(tmp_path) == set()


def test_nothing_is_promised_where_nothing_can_be_noted(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / NOTES).write_text("in the way")
    error = _error(_shard(manifest, "train"))
    with pytest.raises(DamagedShard) as caught, noting(tmp_path, manifest, skips=True):
        raise error
    assert caught.value is error
    assert read_failed(tmp_path) == set()


def test_what_was_found_whole_is_forgotten(manifest: Manifest, tmp_path: Path) -> None:
    one, other = (shard.file for shard in manifest.select("train")[0].shards[:2])
    forget_failed(tmp_path, ())
    for shard in (one, other, one):
        with pytest.raises(UserError), noting(tmp_path, manifest, skips=True):
            raise _error(shard)
    forget_failed(tmp_path, {other})
    assert read_failed(tmp_path) == {other}


def test_the_error_survives_the_trip_between_processes() -> None:
    error = pickle.loads(pickle.dumps(_error("train/C4/000000.tar")))
    assert (str(error), error.shard) == (
        "data/train/C4/000000.tar: is truncated: found 8 bytes; copy it again",
        "train/C4/000000.tar",
    )
