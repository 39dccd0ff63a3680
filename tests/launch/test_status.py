"""States of runs, from the events of their jobs and from Slurm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.launch import slurm, status
from megatron_ext.launch.job import Job, acquire_local_lock
from megatron_ext.launch.slurm import JobState
from megatron_ext.launch.status import status_of, status_table


def job_of(run: Path, number: str | None, *events: str) -> Job:
    job = Job(run / "launch" / "1")
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text("training: {steps: 50}\n")
    if number is not None:
        job.write_number(number)
    if events:
        lines = "".join(f"2026-01-01T00:00:0{n}Z\t{number}\t0\t{event}\n" for n, event in enumerate(events))
        (job.folder / "events.tsv").write_text(lines)
    return job


@pytest.mark.parametrize(
    ("number", "events", "state", "standing", "expected_state"),
    [
        ("7_1", [], JobState("PENDING", "Dependency", ""), "waiting", "pending (Dependency)"),
        ("7", ["begun on n1"], JobState("RUNNING", "", "n1"), "running", "running"),
        ("7", ["begun on n1", "starts anew"], JobState("PENDING", "BeginTime", ""), "waiting", "pending (BeginTime)"),
        ("7", ["begun on n1", "finished"], JobState("COMPLETED", "", "n1"), "finished", "completed"),
        ("7", ["begun on n1", "finished"], None, "finished", "finished"),
        ("7", ["begun on n1"], JobState("CANCELLED", "", "n1"), "stopped", "cancelled"),
        ("7", ["begun on n1", "stopped"], None, "stopped", "stopped"),
        ("7", [], None, "stopped", "ended before it started"),
        ("7", ["begun on n1"], JobState("NODE_FAIL", "", "n1"), "failed", "node_fail"),
        ("7", ["begun on n1", "refused: data.path: there is none; mend"], None, "failed", "refused"),
        (None, ["begun with 2 processes"], None, "failed", "begun with 2 processes"),  # holds no lock
    ],
)
def test_standing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: str | None,
    events: list[str],
    state: JobState | None,
    standing: str,
    expected_state: str,
) -> None:
    monkeypatch.setattr(status, "job_state", lambda _: state)
    job_of(tmp_path / "run", number, *events)
    found = status_of(tmp_path / "run")
    assert (found.standing, found.state) == (standing, expected_state)


def test_local_run_counts_as_running_while_its_lock_is_held(tmp_path: Path) -> None:
    job_of(tmp_path / "run", None, "begun with 2 processes")
    lock = acquire_local_lock(tmp_path / "run")
    assert lock is not None
    assert status_of(tmp_path / "run").standing == "running"
    os.close(lock)
    assert status_of(tmp_path / "run").standing == "failed"


def test_job_of_a_dry_run_does_not_count(tmp_path: Path) -> None:
    job_of(tmp_path / "run", None, "begun with 1 processes", "finished")
    (tmp_path / "run" / "launch" / "2").mkdir()
    assert status_of(tmp_path / "run").standing == "finished"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sizes"
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"runs": ["a", "b", "c"]}))
    job_of(folder / "a", None, "begun with 1 processes", "finished")
    job_of(folder / "b", None, "begun with 1 processes", "refused: optimizer.lr: -1; raise it")
    (folder / "a" / "metrics.jsonl").write_text('{"step": 50, "loss": 2.25, "tokens_per_second": 1000.0}\n')
    return folder


def test_a_sweeps_summary_and_failures(sweep: Path) -> None:
    lines = status_table([status_of(sweep / name) for name in "abc"])
    assert [cell.strip() for cell in lines[2].split("|")[1:7]] == ["a", "local", "finished", "1", "50 of 50", "2.2500"]
    assert lines[5:] == [
        "",
        "3 runs: 1 finished, 1 failed, 1 not begun",
        f"b failed: refused: optimizer.lr: -1; raise it; see {sweep}/b/launch/1/job-local.log",
    ]


def test_json_output(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(sweep), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["standing"] for run in runs] == ["finished", "failed", "not begun"]
    first = {
        "run": "a",
        "step": 50,
        "steps": 50,
        "loss": 2.25,
        "tokens_per_second": 1000.0,
        "job": "local",
        "starts": 1,
    }
    assert first.items() <= runs[0].items()
    assert runs[0]["seconds_ago"] < 600
    assert runs[2]["job"] is None


def test_ended_local_run_does_not_prevent_cancelling_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_of(tmp_path / "a", None, "begun with 2 processes", "finished")
    job_of(tmp_path / "b", None, "begun with 2 processes")
    job_of(tmp_path / "c", "7", "begun on n1")
    job_of(tmp_path / "d", "8", "begun on n1", "finished")
    states = {"7": JobState("RUNNING", "", "n1"), "8": None}
    cancelled: list[str] = []
    monkeypatch.setattr(slurm, "job_state", states.get)
    monkeypatch.setattr(slurm, "cancel", cancelled.append)
    assert main(["cancel", str(tmp_path)]) == 0
    assert (cancelled, capsys.readouterr()) == (["7"], ("c: job 7 was cancelled\n", ""))
    lock = acquire_local_lock(tmp_path / "b")
    assert lock is not None
    assert main(["cancel", str(tmp_path)]) == 2  # Slurm's jobs are cancelled first
    os.close(lock)
    hint = f"selectron: error: {tmp_path}/b: not a Slurm job; stop it where it was started with Ctrl-C\n"
    assert (cancelled, capsys.readouterr()) == (["7", "7"], ("c: job 7 was cancelled\n", hint))
