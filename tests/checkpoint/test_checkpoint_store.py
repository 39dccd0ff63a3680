"""The store: which failures are the disk's, and which runs may continue a checkpoint."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_ext.checkpoint.folder import CheckpointFolder, Progress
from megatron_ext.checkpoint.store import CheckpointStore, _storage_problem
from megatron_ext.errors import UserError


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
        (_stream, "the disk refuses; it may be full"),
    ],
)
def test_a_failure_of_the_disk_is_recognised_wherever_it_hides(raise_it, problem: str) -> None:
    error = caught(raise_it)
    assert _storage_problem(error) == problem


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EFBIG"])
def test_every_refusal_of_the_disk_has_its_name(code: str) -> None:
    number = getattr(errno, code)
    error = OSError(number, os.strerror(number), "/run/file")
    assert _storage_problem(error) == os.strerror(number)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError(errno.ECONNRESET, "Connection reset by peer"), KeyError("name"), None]
)
def test_our_own_failures_are_not_the_disks(error: BaseException | None) -> None:
    assert _storage_problem(error) is None


IDENTITY = {"model.hidden_size": 8, "data.train_domains": ["A", "B"], "training.seed": 1}


def store(root: Path, identity: dict[str, Any]) -> CheckpointStore:
    return CheckpointStore(root, identity, cast(Any, None), cast(Any, None), keep=0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = CheckpointFolder(tmp_path)
    (folder.begin(3) / "data.bin").write_bytes(b"state")
    folder.finish(3, {"progress": Progress(3, 12, 768), "identity": IDENTITY, "generators": [1, 1]}, keep=0)
    return tmp_path


def test_the_same_run_may_continue(saved: Path) -> None:
    assert store(saved, IDENTITY).check(3).progress == Progress(3, 12, 768)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model.hidden_size", 16), ("data.train_domains", ["B", "A"]), ("training.seed", 2), ("mixers.moba.top_k", 3)],
)
def test_a_run_that_differs_may_not(saved: Path, field: str, value: Any) -> None:
    with pytest.raises(UserError) as raised:
        store(saved, {**IDENTITY, field: value}).check(3)
    assert raised.value.where == field
    assert repr(value) in raised.value.problem
    assert str(saved / "step_3") in raised.value.problem
    assert repr(IDENTITY.get(field)) in raised.value.problem
