"""Folders for a while, and what ends the processes that have them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ext.scratch import scratch_folder

HOLDS_ONE = """
import time
from megatron_ext.scratch import scratch_folder
with scratch_folder("kind") as folder:
    (folder / "content").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they are made, by this process and others."""
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


def test_it_is_gone_after_the_block_and_after_an_error(disk: Path) -> None:
    with scratch_folder("kind") as folder:
        assert folder.parent == disk
        (folder / "content").touch()
    assert list(disk.iterdir()) == []
    with pytest.raises(ZeroDivisionError), scratch_folder("kind"):
        raise ZeroDivisionError
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
def test_a_signal_that_ends_the_process_takes_it_along(disk: Path, number: signal.Signals) -> None:
    with held_by_another() as (process, folder):
        assert (folder / "content").exists()
        process.send_signal(number)
        assert process.wait(timeout=30) in (128 + number, -number)
    assert list(disk.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_call(disk: Path) -> None:
    with held_by_another() as (process, folder):
        process.kill()
        process.wait(timeout=30)
        assert (folder / "content").exists()
        with scratch_folder("another"):
            assert folder.exists()
        with scratch_folder("kind") as own:
            assert [path for path in disk.iterdir() if path.is_dir()] == [own]


def test_what_is_in_use_stays(disk: Path) -> None:
    with scratch_folder("kind") as own, held_by_another() as (_, folder), scratch_folder("kind") as more:
        assert sorted(disk.iterdir()) == sorted([own, folder, more])
        assert (folder / "content").exists()


def test_folders_of_another_machine_and_links_stay(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link might lead to what is not of this kind."""
    with held_by_another() as (process, folder):
        process.kill()
        process.wait(timeout=30)
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
