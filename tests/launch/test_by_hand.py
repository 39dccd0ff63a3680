"""Commands `status`, `logs` and `cancel` for runs started by hand with `selectron train`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_status import job_of

from megatron_ext.cli import main
from megatron_ext.commands import logs as logs_command
from megatron_ext.launch import slurm, status
from megatron_ext.launch.ranks import ranks_table
from megatron_ext.launch.slurm import JobState
from megatron_ext.launch.status import status_of
from megatron_ext.run_folder import lock_file
from megatron_ext.run_folder.heartbeat import Heartbeat
from megatron_ext.run_folder.lock import FOLDER, RunLock, acquire
from megatron_ext.run_folder.process_identity import this_process

ME = this_process()
GONE = dataclasses.replace(ME, started="1")


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lock_file.LAUNCH_VARIABLE, raising=False)
    monkeypatch.setattr(lock_file, "_stderr_path", lambda: "")


def trained(run: Path, step: int = 20, *, steps: int = 50) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(f"training: {{steps: {steps}}}\n")
    (run / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 2.25, "tokens_per_second": 1000.0}}\n')
    return run


def held(run: Path, process: object = ME) -> RunLock:
    return acquire(run / FOLDER, str(run), process=process)  # type: ignore[arg-type]


def test_a_run_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held(trained(tmp_path / "a"))
    assert main(["status", str(tmp_path)]) == 0
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")[1:-1]]
    assert row[:6] == ["a", "by hand", f"running (process {ME.pid} on {ME.host})", "", "20 of 50", "2.2500"]
    assert main(["cancel", str(tmp_path)]) == 2
    line = f"{tmp_path}/a: was started by hand: running (process {ME.pid} on {ME.host}); stop it there with Ctrl-C\n"
    assert capsys.readouterr().err == f"selectron: error: {line}"


@pytest.mark.parametrize(
    ("step", "process", "released", "standing", "expected"),
    [
        (50, ME, True, "finished", "finished"),
        (20, ME, True, "stopped", "stopped"),
        (20, GONE, False, "failed", f"gone ({GONE})"),
        (50, GONE, False, "finished", "finished"),
    ],
    ids=["finished", "stopped", "killed", "killed at its end"],  # explicit ids: pids differ between processes
)
def test_a_run_that_has_ended(
    tmp_path: Path, step: int, process: object, released: bool, standing: str, expected: str
) -> None:
    lock = held(trained(tmp_path / "a", step), process)
    if released:
        lock.release()
    found = status_of(tmp_path / "a")
    assert (found.standing, found.state, found.job, found.problems) == (standing, expected, "by hand", ())


def test_a_run_of_older_code(tmp_path: Path) -> None:
    found = status_of(trained(tmp_path / "a"))
    assert (found.standing, found.step, found.steps, found.job) == ("stopped", 20, 50, "by hand")


def test_no_run_is_not_a_manual_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "a")
    (tmp_path / "data").mkdir()
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert [run["run"] for run in json.loads(capsys.readouterr().out)] == ["a"]
    assert main(["status", str(tmp_path / "data")]) == 2
    assert f"{tmp_path}/data: contains no run that has started" in capsys.readouterr().err


def test_launched_run_continued_by_hand_has_one_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has ended long ago. The run's own process is recognized as its own."""
    run = trained(job_of(tmp_path / "a", "7", "begun on n1", "stopped").run)
    monkeypatch.setattr(status, "job_state", lambda _: None)
    assert status_of(run).standing == "stopped"
    lock = held(run)
    assert (status_of(run).standing, status_of(run).job) == ("running", "by hand")
    lock.release()
    monkeypatch.setenv(lock_file.LAUNCH_VARIABLE, "1")
    held(run)
    assert (status_of(run).standing, status_of(run).job) == ("stopped", "7")
    monkeypatch.setattr(status, "job_state", lambda _: JobState("RUNNING", "", "n1"))
    assert (status_of(run).standing, status_of(run).state) == ("running", "running")


def test_template_started_by_hand_counts_as_manual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script submitted without `launch` has no job folder in the run folder."""
    monkeypatch.setenv(lock_file.LAUNCH_VARIABLE, "work")
    held(trained(tmp_path / "a"))
    assert (status_of(tmp_path / "a").standing, status_of(tmp_path / "a").job) == ("running", "by hand")


def test_later_job_takes_precedence_over_a_manual_start(tmp_path: Path) -> None:
    run = trained(tmp_path / "a", 50)
    held(run).release()
    job = job_of(run, None, "begun with 2 processes", "finished")
    events = job.folder / "events.tsv"
    events.write_text(events.read_text().replace("2026", "2199"))
    assert (status_of(run).job, status_of(run).event) == ("local", "finished")


def test_logs_show_the_output_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, shown = tmp_path / "my.log", list[str]()
    log.write_text("said\n")
    monkeypatch.setattr(lock_file, "_stderr_path", lambda: str(log))
    monkeypatch.setattr(logs_command.os, "execvp", lambda _, words: shown.append(words[-1]))
    held(trained(tmp_path / "a"))
    main(["logs", str(tmp_path / "a")])
    expected = f"selectron: {tmp_path}/a was started by hand (running ({ME})); its output goes to {log}\n"
    assert (shown, capsys.readouterr().err) == ([str(log)], expected)
    log.unlink()
    assert main(["logs", str(tmp_path / "a")]) == 2
    assert f"its output file {log} does not exist" in capsys.readouterr().err


def test_logs_report_that_no_output_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held(trained(tmp_path / "a")).release()
    assert main(["logs", str(tmp_path / "a")]) == 2
    expected = f"{tmp_path}/a: was started by hand (ended), and its output was not saved; see "
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("to", "expected"), [("file", "out.log"), ("pipe", "")])
def test_lock_records_the_output_file(tmp_path: Path, to: str, expected: str) -> None:
    code = "from megatron_ext.run_folder import lock_file; print(lock_file._stderr_path())"
    with (tmp_path / "out.log").open("w") as file:
        stderr = file if to == "file" else subprocess.PIPE
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True)
    assert done.stdout.strip() == (str(tmp_path / expected) if expected else "")


def test_ranks_of_another_start_are_not_counted(tmp_path: Path) -> None:
    """The folder was removed and the run restarted while processes of the first start were still alive."""
    run = trained(tmp_path / "a")
    lock = held(run)
    for rank, start in ((0, lock.token), (1, "of another"), (2, "")):
        Heartbeat(run, rank, 60, start).close()
    lines = ranks_table(run)
    assert [line.split("|")[1].strip() for line in lines[2:] if line.startswith("|")] == ["0", "2"]
    assert lines[-1] == f"rank 1 on {ME.host} (process {os.getpid()}) belongs to another start of the run"


def test_cancel_without_a_job_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "job_state", lambda _: None)
    for name in "ab":
        job_of(tmp_path / name, "7", "begun on n1", "finished")
    assert main(["cancel", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing was cancelled: none of the 2 runs has a waiting or running job\n"
    assert main(["cancel", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == f"nothing was cancelled: {tmp_path}/a has no waiting or running job\n"
