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
def test_a_failure_of_the_disk_is_recognised_wherever_it_hides(raise_it, problem: str) -> None:
    error = caught(raise_it)
    assert storage_problem(error) == problem


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EFBIG"])
def test_every_refusal_of_the_disk_has_its_name(code: str) -> None:
    number = getattr(errno, code)
    error = OSError(number, os.strerror(number), "/run/file")
    assert storage_problem(error) == os.strerror(number)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError(errno.ECONNRESET, "Connection reset by peer"), KeyError("name"), None]
)
def test_our_own_failures_are_not_the_disks(error: BaseException | None) -> None:
    assert storage_problem(error) is None


def _not_as_written() -> None:
    raise NotAsWritten("data.bin has 3 bytes on the disk, and 5 were written")


def test_a_file_that_is_not_as_written_is_the_disks_doing() -> None:
    assert storage_problem(caught(_not_as_written)) == "data.bin has 3 bytes on the disk, and 5 were written"


def test_a_failure_travels_with_its_traceback(tmp_path: Path) -> None:
    failure = pickle.loads(pickle.dumps(Failure.of(caught(_cause), tmp_path)))
    assert failure.problem == "No space left on device"
    assert "RuntimeError: Worker failure" in failure.trace
    assert Failure.of(ValueError("a bug"), tmp_path).problem is None


def test_a_full_disk_is_the_reason_whatever_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_NEXT_TO_NOTHING", 1 << 62)  # simulates a full disk
    assert Failure.of(ValueError("half a zip file"), tmp_path).problem == "No space left on device"
