"""Tracking services see each record of a run once, whatever happened to the run; their errors do not end it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.run_folder.layout import tracker_file_name
from megatron_ext.training.loggers.core.registry import LOGGERS, load_all, register
from megatron_ext.training.loggers.core.tracker import Point, Tracker
from megatron_ext.training.records import RunRecords, copy_records

STEPS = 20

RUNS: list[list[tuple[int, str]]] = []
"""Steps and tags that each run of the fake service received."""


class Service(Tracker):
    service = "fake"
    broken = False
    ends: tuple[bool, ...] = ()

    def begin(self, run_id: str | None) -> str:
        if run_id is None:
            RUNS.append([])
        self.at = len(RUNS) - 1 if run_id is None else int(run_id)
        return str(self.at)

    def send(self, points: Sequence[Point]) -> None:
        if Service.broken:
            raise ConnectionError("no route to\nhttps://user:secret@host")
        RUNS[self.at] += [(point.step, tag) for point in points for tag in point.metrics if tag != "train/grad_norm"]

    def finish(self, *, finished: bool) -> None:
        Service.ends = (*Service.ends, finished)


@pytest.fixture(autouse=True)
def service() -> Iterator[None]:
    load_all()
    register("fake")(Service)
    RUNS.clear()
    Service.broken, Service.ends = False, ()
    yield
    del LOGGERS["fake"]


def open_records(folder: Path, first: int) -> RunRecords:
    return RunRecords(folder, "run", first, STEPS, backends=["fake"])


def step(records: RunRecords, number: int) -> None:
    metrics: dict[str, Any] = {"loss": 5.0, "grad_norm": 1.0, "tokens_per_second": 1.0}
    records.step({"step": number, **metrics})
    if number % 3 == 0:
        records.evaluation([{"step": number, "split": "test", "domain": "Code", "loss": 4.0}])


def write(folder: Path, first: int, last: int) -> None:
    records = open_records(folder, first)
    for number in range(first + 1, last + 1):
        step(records, number)
    records.close()


def expected(last: int) -> list[tuple[int, str]]:
    tags = ("train/loss", "train/tokens_per_second")
    return [(s, tag) for s in range(1, last + 1) for tag in (*tags, *(["test/Code"] if s % 3 == 0 else []))]


def test_a_resumed_run_continues_its_run_at_the_service(tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    write(tmp_path, 4, STEPS)
    assert [expected(STEPS)] == RUNS
    assert Service.ends == (False, True)


def test_repeated_steps_are_sent_to_a_new_tracked_run(tmp_path: Path) -> None:
    write(tmp_path, 0, 7)
    write(tmp_path, 3, 5)
    assert [expected(7), expected(5)] == RUNS
    write(tmp_path, 5, 6)
    assert [expected(7), expected(6)] == RUNS


def test_killed_start_is_not_continued_at_the_service(tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    step(open_records(tmp_path, 4), 5)  # the service may have received it, but no checkpoint contains it
    open_records(tmp_path, 4)
    write(tmp_path, 4, 6)
    assert expected(6) == RUNS[-1]


def test_a_rollback_begins_a_new_run(tmp_path: Path) -> None:
    records = open_records(tmp_path, 0)
    for number in range(1, 6):
        step(records, number)
    records.rewind(5)  # a skipped step: nothing to repeat
    records.rewind(3)
    step(records, 4)
    records.close()
    assert [expected(5), expected(4)] == RUNS


def test_steps_logged_without_the_service_are_sent_later(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    records = RunRecords(tmp_path, "run", 2, STEPS, backends=[])
    step(records, 3)
    records.close()
    write(tmp_path, 3, 4)
    assert [expected(2), expected(4)] == RUNS


def test_branch_has_its_own_tracked_run_with_the_trunks_steps(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    trunk.mkdir()
    branch.mkdir()
    write(trunk, 0, 4)
    for _ in range(2):  # the second start repeats the first, which has reached no checkpoint
        copy_records(trunk, branch)
        write(branch, 4, 4)
    assert [expected(4)] * 3 == RUNS


def test_an_error_of_the_service_is_one_line_and_the_next_start_sends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Service.broken = True
    write(tmp_path, 0, 4)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    problem = "ConnectionError: no route to https://***@host"
    assert line == f"selectron: warning: fake: {problem}; training continues, and the next start sends all steps"
    assert not (tmp_path / tracker_file_name("fake")).exists()
    Service.broken = False
    write(tmp_path, 4, 5)
    assert expected(5) == RUNS[-1]
