"""Temporary folders, and their removal when their processes end."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ext.utils.temp_dirs import keep_folder, scratch_folder, user_folder

HOLDS_ONE = """
import time
from megatron_ext.utils.temp_dirs import scratch_folder
with scratch_folder("kind") as folder:
    (folder / "content").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parent folder of temporary folders, for this process and its children."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def held_by_another() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    given = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", HOLDS_ONE], env=given, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def test_folder_is_removed_after_the_block_and_after_an_error(disk: Path) -> None:
    with scratch_folder("kind") as folder:
        assert folder.parent == disk
        (folder / "content").touch()
    assert list(disk.iterdir()) == []
    with pytest.raises(ZeroDivisionError), scratch_folder("kind"):
        raise ZeroDivisionError
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
def test_signal_that_ends_the_process_removes_the_folder(disk: Path, number: signal.Signals) -> None:
    with held_by_another() as (process, folder):
        assert (folder / "content").exists()
        process.send_signal(number)
        assert process.wait(timeout=120) in (128 + number, -number)
    assert list(disk.iterdir()) == []


def test_folder_of_a_killed_process_is_removed_by_the_next_call(disk: Path) -> None:
    with held_by_another() as (process, folder):
        process.kill()
        process.wait(timeout=120)
        assert (folder / "content").exists()
        with scratch_folder("another"):
            assert folder.exists()
        with scratch_folder("kind") as own:
            assert [path for path in disk.iterdir() if path.is_dir()] == [own]


def test_folder_in_use_is_kept(disk: Path) -> None:
    with scratch_folder("kind") as own, held_by_another() as (_, folder), scratch_folder("kind") as more:
        assert sorted(disk.iterdir()) == sorted([own, folder, more])
        assert (folder / "content").exists()


def test_folders_of_another_machine_and_links_stay(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may lead to a folder of another kind."""
    with held_by_another() as (process, folder):
        process.kill()
        process.wait(timeout=120)
    elsewhere = folder.rename(disk / "elsewhere")
    folder.symlink_to(elsewhere)
    with scratch_folder("kind"):
        pass
    assert (elsewhere / "content").exists()
    folder.unlink()
    elsewhere.rename(folder)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with scratch_folder("kind"):
        assert (folder / "content").exists()


def test_kept_folder_is_never_removed(disk: Path) -> None:
    with scratch_folder("kind") as folder:
        (folder / "log").touch()
        keep_folder(folder)
    with scratch_folder("kind"):
        assert (folder / "log").exists()
    assert [path.name for path in folder.iterdir()] == ["log"]


def test_folder_elsewhere_is_private_to_the_user(tmp_path: Path) -> None:
    with scratch_folder("kind", tmp_path / "..") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent.resolve() == tmp_path.parent.resolve()
    assert not folder.exists()


def test_foreign_files_are_neither_followed_nor_removed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links to our folders and files, and another user's folder, with names of leftover temporary folders."""
    start, victim = f"selectron-kind-{socket.gethostname()}-", disk / "victim"
    victim.mkdir()
    (victim / ".held").write_text("kept")
    (disk / f"{start}link").symlink_to(victim)
    trap = disk / f"{start}trap"
    trap.mkdir()
    (trap / ".held").symlink_to(victim / ".held")
    foreign = disk / f"{start}foreign"
    foreign.mkdir()
    (foreign / ".held").touch()
    whole = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        found = whole(path)
        return os.stat_result((*found[:4], 12345, *found[5:])) if path == foreign else found

    monkeypatch.setattr(Path, "lstat", of_another)
    with scratch_folder("kind"):
        pass
    assert (victim / ".held").read_text() == "kept"
    assert trap.exists()
    assert foreign.exists()


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_user_folder_accessible_to_others_is_rejected(disk: Path, kind: str) -> None:
    assert stat.S_IMODE(user_folder().stat().st_mode) == 0o700
    assert user_folder() == disk / f"selectron-{os.getuid()}"
    user_folder().rmdir()
    if kind == "link":
        (disk / "elsewhere").mkdir(mode=0o700)
        (disk / f"selectron-{os.getuid()}").symlink_to(disk / "elsewhere")
    elif kind == "file":
        (disk / f"selectron-{os.getuid()}").touch()
    else:
        (disk / f"selectron-{os.getuid()}").mkdir()
        (disk / f"selectron-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="does not belong only to this user"):
        user_folder()
