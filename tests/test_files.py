"""A file is what it was before, or all of the new content, whatever happens in between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_ext import files
from megatron_ext.files import write_whole


def test_content_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"first")
    assert path.read_bytes() == b"first"
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["file"]


def test_a_reader_sees_the_old_content_until_the_new_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", []
    path.write_bytes(b"old")

    def look(forced: Path) -> None:
        seen.append((forced.name, forced.read_bytes() if forced.is_file() else None, path.read_bytes()))

    monkeypatch.setattr(files, "force_to_disk", look)
    write_whole(path, b"new")
    # First the content, while the old file still stands; then the folder that holds the new name.
    assert seen == [(".file.partial", b"new", b"old"), (tmp_path.name, None, b"new")]


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "force_to_disk", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_an_interrupted_writer_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".file.partial").write_bytes(b"half of somethi")
    write_whole(tmp_path / "file", b"whole")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "file", b"content")
