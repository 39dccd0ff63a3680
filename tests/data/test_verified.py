"""Verification of data at a resume: only changed files are read again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.manifest import Manifest
from megatron_ext.data.verified import ShardVerifier, read_verified, write_verified
from megatron_ext.data.verify import find_damage, verify_shards
from megatron_ext.utils.errors import UserError


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def _checked(root: Path, manifest: Manifest, folder: Path) -> ShardVerifier:
    """Verify the data as the start of a run in `folder` does."""
    verified = ShardVerifier(root, read_verified(folder))
    verify_shards(root, manifest, check=verified.check)
    write_verified(folder, verified.stamps)
    return verified


def test_unchanged_files_are_not_read_again(
    copy: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _checked(copy, manifest, tmp_path)
    files = 2 * sum(len(entry.shards) for entry in manifest.domains)
    assert (len(first.stamps), first.num_unchanged) == (files, 0)

    def no_reading(path: Path) -> Any:
        raise AssertionError(f"{path} is read")

    monkeypatch.setattr("data_prep.manifest.sha256_of", no_reading)
    second = _checked(copy, manifest, tmp_path)
    assert (second.stamps, second.num_unchanged) == (first.stamps, files)
    with pytest.raises(AssertionError, match="is read"):
        verify_shards(copy, manifest, check=ShardVerifier(copy, {}).check)


def _flip(path: Path) -> None:
    """Flip a bit and restore the file times."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(stat.st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _replace(path: Path) -> None:
    """Replace a file by another one of the same size and times."""
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    shutil.copystat(path, other)
    other.replace(path)


@pytest.mark.parametrize("suffix", [".tar", ".index.npy"])
@pytest.mark.parametrize("change", [_flip, _replace, Path.unlink])
def test_changed_files_are_found(
    copy: Path, manifest: Manifest, tmp_path: Path, suffix: str, change: Callable[[Path], None]
) -> None:
    _checked(copy, manifest, tmp_path)
    entry = manifest.select("train", ["CommonCrawl"])[0]
    shard = entry.shards[1]
    path = copy / shard.file.replace(".tar", suffix)
    change(path)
    with pytest.raises(UserError, match=path.name):
        _checked(copy, manifest, tmp_path)
    verified = ShardVerifier(copy, read_verified(tmp_path))
    damages = find_damage(copy, manifest, "train", [entry.domain], check=verified.check)
    assert [damage.shard for damage in damages] == [shard.file]
    assert str(path) not in verified.stamps


def test_suspect_shards_are_read_again(
    copy: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = _checked(copy, manifest, tmp_path).stamps
    shard = manifest.select("train")[0].shards[0]
    verified = ShardVerifier(copy, known, {shard.file})
    verify_shards(copy, manifest, check=verified.check)
    assert (verified.stamps, verified.num_unchanged) == (known, len(known) - 2)

    def bad_disk(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("data_prep.manifest.sha256_of", bad_disk)
    verify_shards(copy, manifest, check=ShardVerifier(copy, known).check)  # nothing is read
    (damage,) = find_damage(
        copy, manifest, "train", ["C4", "CommonCrawl"], check=ShardVerifier(copy, known, {shard.file}).check
    )
    assert damage.problem == f"{copy / shard.file} or its index cannot be read (Input/output error)"


def test_stamps_of_another_manifest_are_ignored(copy: Path, manifest: Manifest, tmp_path: Path) -> None:
    known = _checked(copy, manifest, tmp_path).stamps
    other = {path: ["0" * 64, *stamp[1:]] for path, stamp in known.items()}
    verified = ShardVerifier(copy, other)
    verify_shards(copy, manifest, check=verified.check)
    assert verified.num_unchanged == 0


@pytest.mark.parametrize("content", [None, b"", b"[1]", b"{"])
def test_unreadable_record_is_empty(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "verified_shards.json").write_bytes(content)
    assert read_verified(tmp_path) == {}
