"""Classification of disk failures, and their messages across ranks."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from megatron_ext.checkpoint import disk
from megatron_ext.checkpoint.disk import Failure, NotAsWritten, storage_problem


def caught(raise_it) -> BaseException:
    try:
        raise_it()
    except BaseException as error:
        return error
    raise AssertionError


def _cause() -> None:
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/file")
    except OSError as error:
        raise RuntimeError("Worker failure") from error


def _context() -> None:
    try:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    except OSError:
        raise RuntimeError("while handling it")  # noqa: B904  (what libraries do)


def _text() -> None:
    raise RuntimeError("Worker failed: Traceback ... OSError: [Errno 28] No space left on device: '/run/file'")


def _stream() -> None:
    raise RuntimeError("basic_ios::clear: iostream error")


@pytest.mark.parametrize(
    ("raise_it", "problem"),
    [
        (_cause, "No space left on device"),
        (_context, "Disk quota exceeded"),
        (_text, "No space left on device"),
        (_stream, "the write failed; the disk may be full"),
    ],
)
def test_a_storage_error_is_found_behind_other_errors(raise_it, problem: str) -> None:
    error = caught(raise_it)
    assert storage_problem(error) == problem


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EFBIG"])
def test_storage_errors_are_named(code: str) -> None:
    number = getattr(errno, code)
    error = OSError(number, os.strerror(number), "/run/file")
    assert storage_problem(error) == os.strerror(number)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError(errno.ECONNRESET, "Connection reset by peer"), KeyError("name"), None]
)
def test_other_errors_are_not_storage_errors(error: BaseException | None) -> None:
    assert storage_problem(error) is None


def _not_as_written() -> None:
    raise NotAsWritten("data.bin has 3 bytes on the disk, and 5 were written")


def test_a_file_that_differs_from_its_data_is_a_storage_error() -> None:
    assert storage_problem(caught(_not_as_written)) == "data.bin has 3 bytes on the disk, and 5 were written"


def test_a_failure_contains_its_traceback(tmp_path: Path) -> None:
    failure = pickle.loads(pickle.dumps(Failure.from_error(caught(_cause), tmp_path)))
    assert failure.problem == "No space left on device"
    assert "RuntimeError: Worker failure" in failure.trace
    assert Failure.from_error(ValueError("a bug"), tmp_path).problem is None


def test_on_a_full_disk_any_error_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_MIN_FREE_BYTES", 1 << 62)  # simulates a full disk
    assert Failure.from_error(ValueError("half a zip file"), tmp_path).problem == "No space left on device"
