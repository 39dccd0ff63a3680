"""Limits on open files of processes that run tasks."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.running.workers import RESERVED_FILES, allow_open_files
from megatron_ext.utils.errors import UserError

PAIRS_OF_MANY_TASKS = """
import resource, sys
from datatrove.data import Document
from data_prep.deduplication.duplicates import exact_duplicates

from megatron_ext.utils.errors import UserError

folder, tasks = sys.argv[1], 150
documents = [Document(f"text {task // 2}", str(task), metadata={"split": "train"}) for task in range(tasks)]
signatures, pairs, _ = exact_duplicates([], folder, tasks).stages
for task, document in enumerate(documents):
    stream = iter([document])
    for step in signatures.steps:
        stream = step.run(stream, task, tasks)
for hard_limit in (400, 200):
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard_limit))
    try:
        for step in pairs.steps:
            step.run(None, 0, 1)
        print(hard_limit, "found")
    except UserError as error:
        print(hard_limit, error)
"""


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Soft and hard limit on open files of this process, restored afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_file_limit_is_raised(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_open_files(512 - RESERVED_FILES)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, hard)
    allow_open_files(513)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (513 + RESERVED_FILES, hard)


def test_open_file_limit_too_low(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    message = (
        r"^--tasks: the files of all 5,000 tasks are open at once, but the limit here is 4,096 \(ulimit -Hn\); "
        r"give at most 3,996, or raise the limit$"
    )
    with pytest.raises(UserError, match=message):
        allow_open_files(5000)


def test_duplicates_of_many_tasks(tmp_path: Path) -> None:
    """datatrove opens the signature files of all 150 tasks at once. A hard limit of 400 suffices, 200 does not."""
    command = [sys.executable, "-c", PAIRS_OF_MANY_TASKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = [line for line in done.stdout.splitlines() if line[:4] in ("400 ", "200 ")]
    assert first == "400 found"
    assert second.startswith("200 --tasks: the files of all 150 tasks")
    (pairs,) = (tmp_path / "pairs").iterdir()
    assert pairs.stat().st_size == 75 * 4 * 4  # file and document of both members of a pair, for every second task
