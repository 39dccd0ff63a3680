"""Atomic writes: a file has its old content or all of the new content, whatever happens in between."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.commands import doctor
from megatron_ext.launch.job import copy_code
from megatron_ext.utils import atomic_files
from megatron_ext.utils.atomic_files import (
    open_to_append,
    open_to_write,
    os_error_reason,
    read_regular,
    write_atomically,
    write_private,
)
from megatron_ext.utils.errors import UserError


def test_content_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"first")
    assert path.read_bytes() == b"first"
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["file"]


def test_readers_see_the_old_content_until_the_new_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "file", []
    path.write_bytes(b"old")

    def look(forced: Path) -> None:
        seen.append((forced.name, forced.read_bytes() if forced.is_file() else None, path.read_bytes()))

    monkeypatch.setattr(atomic_files, "fsync_path", look)
    write_atomically(path, b"new")
    # fsync the content first, while the old file exists, then the folder with the new name.
    assert seen == [(".file.partial", b"new", b"old"), (tmp_path.name, None, b"new")]


def test_full_disk_keeps_the_previous_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_files, "fsync_path", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_partial_file_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".file.partial").write_bytes(b"half of somethi")
    write_atomically(tmp_path / "file", b"whole")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "file", b"content")


def fails(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # like errors of write, without a file name


def test_failed_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "open_to_write", fails)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "file", b"x")
    assert caught.value.filename == str(tmp_path / "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EACCES, "Permission denied", "x"), "Permission denied"),
        (shutil.Error([("a", "b", "[Errno 28] No space left")]), "[Errno 28] No space left"),
        (shutil.Error([("a", "b", "one"), ("c", "d", "two")]), "one, and 1 more"),
        (shutil.SameFileError("a and b are\nthe same file"), "a and b are the same file"),
        (OSError("a library's words"), "a library's words"),
        (OSError(), "OSError"),
    ],
)
def test_no_reason_is_none(error: OSError, reason: str) -> None:
    assert os_error_reason(error) == reason


def test_private_files(tmp_path: Path) -> None:
    write_private(tmp_path / "file", b"x")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            write_private(tmp_path / name, b"y")
    assert not (tmp_path / "elsewhere").exists()


def test_full_disk_is_a_one_line_error_of_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object) -> int:
        write_atomically(tmp_path / "results.json", b"x")
        return 0

    monkeypatch.setattr(atomic_files, "open_to_write", fails)
    monkeypatch.setattr(doctor, "run", write)
    assert cli.main(["doctor"]) == 2
    where = f"selectron: error: {tmp_path}/results.json: cannot be written (No space left on device); "
    assert capsys.readouterr().err == where + "free disk space, or choose another location\n"


def test_full_disk_during_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])

    monkeypatch.setattr(shutil, "copytree", copy)
    with pytest.raises(UserError, match=r"cannot be written \(\[Errno 28\] No space left on device: 'b'\)"):
        copy_code(tmp_path / "code")


def test_foreign_link_does_not_redirect_writes(tmp_path: Path) -> None:
    """A stranger's run folder may have a link with the name of the temporary file."""
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_bytes(b"precious")
    folder.mkdir()
    (folder / ".file.partial").symlink_to(outside)
    write_atomically(folder / "file", b"whole")
    assert outside.read_bytes() == b"precious"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"file": b"whole"}
    assert not (folder / "file").is_symlink()


@pytest.mark.parametrize("there", [True, False], ids=["file", "dangling"])
def test_appending_does_not_follow_a_link(tmp_path: Path, there: bool) -> None:
    outside, link = tmp_path / "outside", tmp_path / "metrics.jsonl"
    if there:
        outside.write_bytes(b"precious")
    link.symlink_to(outside)
    with pytest.raises(OSError, match="is a link, which is not followed to write"):
        open_to_append(link)
    assert outside.exists() == there
    assert not there or outside.read_bytes() == b"precious"


def test_pipe_is_neither_read_nor_written(tmp_path: Path) -> None:
    """Reading or writing would block until the other end opens."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        read_regular(pipe)
    with pytest.raises(OSError, match="No such device"):
        open_to_write(pipe)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_lines_are_appended(tmp_path: Path) -> None:
    for line in ("a\n", "b\n"):
        with open_to_append(tmp_path / "lines") as file:
            file.write(line)
    assert (tmp_path / "lines").read_text() == "a\nb\n"
