"""Commands `status`, `logs` and `cancel` with a damaged file in one run: they report it and show the other runs."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_status import job_of

from megatron_ext.cli import main
from megatron_ext.commands import logs as logs_command
from megatron_ext.launch import slurm, status
from megatron_ext.launch.slurm import JobState
from megatron_ext.run_folder.heartbeat import FOLDER as HEARTBEATS
from megatron_ext.run_folder.heartbeat import Heartbeat
from megatron_ext.run_folder.lock import FOLDER as LOCK
from megatron_ext.run_folder.lock import acquire
from megatron_ext.run_folder.lock_file import LAUNCH_VARIABLE

HUGE = b"9" * 5000
FILES = {
    "sweep.json": "sweep.json",
    "events.tsv": "b/launch/1/events.tsv",
    "config.yaml": "b/launch/1/config.yaml",
    "job_id": "b/launch/1/job_id",
    "metrics.jsonl": "b/metrics.jsonl",
    "heartbeat": f"b/{HEARTBEATS}/rank_0",
    "lock": f"b/{LOCK}/1",
    "launch lock": "b/launch/lock",
}


def huge(path: Path) -> None:
    """Replace each number of a file by one that Python does not parse: 5,000 digits, or an out-of-range float."""
    content = path.read_bytes()
    for number in (b"50", b"7", b"0", b"1", b"2.25"):
        content = content.replace(number, HUGE)
    path.write_bytes(content)


def folder_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")


def pipe_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "NUL tail": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 100 + b"\n"),
    "NULs": lambda path: path.write_bytes(b"\0" * len(path.read_bytes()) + b"\n"),
    "half a line": lambda path: path.write_bytes(path.read_bytes()[: len(path.read_bytes().rstrip()) // 2] + b"\n"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\n" + path.read_bytes() + b"\xff\n"),
    "a list": lambda path: path.write_bytes(b"[1, 2]\n"),
    "deep": lambda path: path.write_bytes(b"[" * 1100 + b"\n"),
    "huge number": huge,
    "folder": folder_instead,
    "dangling link": dangling,
    "pipe": pipe_instead,
    "without end": lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero")),
    "unreadable": lambda path: None,  # done in the fixture `damaged`
}

SILENT = {
    # Without heartbeats or lock, a run is by older code or another command. Without records, it has just started. A
    # dangling link counts as a missing file. The content of the launcher's lock is not read.
    *(("launch lock", damage) for damage in DAMAGES),
    *(("lock", damage) for damage in DAMAGES),
    *((file, "empty") for file in ("metrics.jsonl", "heartbeat", "events.tsv")),
    *((file, "dangling link") for file in ("events.tsv", "job_id")),
    ("sweep.json", "huge number"),  # the file has no numbers
}


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """Make a read that would block for ever, such as from a pipe, fail."""

    def late(*_: object) -> None:
        raise AssertionError("waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 120)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sizes"
    folder.mkdir()
    monkeypatch.setenv(LAUNCH_VARIABLE, "1")
    (folder / "sweep.json").write_text(json.dumps({"runs": ["a", "b", "c"]}))
    for name in "abc":
        run = job_of(folder / name, "7", "begun on n1").run
        (run / "metrics.jsonl").write_text('{"step": 50, "loss": 2.25, "tokens_per_second": 1000.0}\n')
        (run / "launch" / "lock").touch()
        (run / "launch" / "1" / "job-7.log").write_text("said\n")
        heartbeat = Heartbeat(run, 0, 60)
        heartbeat.close()
        acquire(run / LOCK, name)
    monkeypatch.setattr(status, "job_state", lambda _: JobState("RUNNING", "", "n1"))
    monkeypatch.setattr(slurm, "job_state", lambda _: JobState("RUNNING", "", "n1"))
    monkeypatch.setattr(slurm, "cancel", lambda _: None)
    return folder


@pytest.fixture
def damaged(sweep: Path, file: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Damage the file and return its path."""
    path = sweep / FILES[file]
    DAMAGES[damage](path)
    if damage == "unreadable":  # also for root
        opened = os.open

        def refuse(name: Any, *args: Any, **options: Any) -> int:
            if name == path:
                raise PermissionError(13, "Permission denied", str(name))
            return opened(name, *args, **options)

        monkeypatch.setattr(os, "open", refuse)
    return path


def rows(printed: str) -> dict[str, list[str]]:
    """Cells of the rows of the first table, by run."""
    table = printed.partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {row[0]: row[:7] for row in cells}


# Deeply nested YAML is tested with the configuration reader, and slow.
CASES = [case for case in product(FILES, DAMAGES) if case != ("config.yaml", "deep")]
SOUND = ["7", "running", "1", "50 of 50", "2.2500", "1,000"]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_damaged_file_is_named_and_other_runs_are_listed(
    sweep: Path,
    damaged: Path,
    file: str,
    damage: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["status", str(sweep), "--ranks"]) == 0
    captured = capsys.readouterr()
    found = rows(captured.out)
    assert found["a"] == ["a", *SOUND]
    assert found["c"] == ["c", *SOUND]
    assert list(found) == ["a", "b", "c"]
    if (file, damage) not in SILENT:
        assert str(damaged) in captured.out + captured.err
    assert main(["status", str(sweep), "--json", "--ranks"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    runs = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [run["run"] for run in runs] == ["a", "b", "c"]
    assert [runs[number]["problems"] for number in (0, 2)] == [[], []]
    if (file, damage) not in SILENT and file not in ("sweep.json", "heartbeat"):
        assert any(str(damaged) in problem for problem in runs[1]["problems"])
    shown: list[str] = []
    monkeypatch.setattr(logs_command.os, "execvp", lambda _, words: shown.append(words[-1]))
    code = main(["cancel", str(sweep)])
    captured = capsys.readouterr()
    assert {"a: job 7 was cancelled", "c: job 7 was cancelled"} <= set(captured.out.splitlines())
    assert code in (0, 2)
    assert all(line.startswith("selectron: ") for line in captured.err.splitlines())
    code = main(["logs", str(sweep / "b")])
    captured = capsys.readouterr()
    assert code == 2 or shown == [str(sweep / "b" / "launch" / "1" / "job-7.log")]
    assert len(captured.err.splitlines()) == (1 if code == 2 else 0)


def test_record_between_damaged_lines_is_found(sweep: Path) -> None:
    """After a power cut and a resume, the next record shares the line of the truncated one."""
    path = sweep / "b" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 51, "lo\0\0\0{"step": 51, "loss": 2.0, "tokens_per_second": 1.0}\n')
    found = status.status_of(sweep / "b")
    assert (found.step, found.loss) == (50, 2.25)
    assert len(found.problems) == 1
    path.write_bytes(path.read_bytes() + b'{"step": 52, "loss": 2.0, "tokens_per_second": 1.0}\n')
    assert status.status_of(sweep / "b").step == 52


def test_nonfinite_loss_is_null(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / "b" / "metrics.jsonl").write_text('{"step": 3, "loss": NaN, "tokens_per_second": 1.0}\n')
    assert main(["status", str(sweep / "b"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out, parse_constant=lambda _: pytest.fail("no JSON"))
    assert (run["step"], run["loss"], run["problems"]) == (3, None, [])


def test_first_of_many_problems_are_named(sweep: Path) -> None:
    (sweep / "b" / "launch" / "1" / "events.tsv").write_text("x\n" * 100)
    lines = status.status_table([status.status_of(sweep / "b")])
    assert len(lines) == 3 + 4
    assert lines[-1] == "b: 97 more damaged lines or files"


HUGE_NUMBERS = [{"further": 10**400}, {"passes": 10**400}, {"pid": -(10**400)}, {"written": float("nan")}]


@pytest.mark.parametrize("numbers", HUGE_NUMBERS, ids=lambda numbers: next(iter(numbers)))
def test_heartbeat_with_invalid_numbers_is_named(
    sweep: Path, numbers: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = sweep / "b" / HEARTBEATS / "rank_0"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"further": 0, "ended": False} | numbers))
    assert main(["status", str(sweep / "b"), "--ranks"]) == 0
    assert f"{path}: is not a heartbeat" in capsys.readouterr().out


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_is_escaped_on_a_terminal(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sweep / "b/launch/1/job-7.log").write_text("first\n50%\r100%\n\x1b]0;title\x07\x1b[2Jlast\n", newline="")

    def replace(*_: object) -> None:
        raise AssertionError("what tail prints is not escaped")

    monkeypatch.setattr(os, "execvp", replace)
    monkeypatch.setattr(sys, "stdout", screen := Screen(newline=""))
    assert main(["logs", str(sweep / "b"), "--lines", "2"]) == 0
    assert screen.getvalue() == "50%\r100%\n\\x1b]0;title\\x07\\x1b[2Jlast\n"
