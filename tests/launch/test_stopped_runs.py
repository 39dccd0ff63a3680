"""Stopped runs, which can be resumed: they are neither finished nor failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_job import start_job, written
from test_sweep import sweep_of

from megatron_ext.launch.status import read_job_events, status_of
from megatron_ext.utils import error_reporting
from megatron_ext.utils.errors import EXIT_STOPPED


def test_stopped_rank_without_a_batch_script_returns_75(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(error_reporting.STOPPED_FILE, raising=False)
    assert error_reporting.stop_exit_code() == EXIT_STOPPED == 75


def test_stopped_ranks_of_a_batch_script_create_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stopped"
    monkeypatch.setenv(error_reporting.STOPPED_FILE, str(file))
    monkeypatch.setenv("RANK", "1")
    assert (error_reporting.stop_exit_code(), file.exists()) == (0, False)
    monkeypatch.setenv("RANK", "0")
    assert (error_reporting.stop_exit_code(), file.exists()) == (0, True)
    monkeypatch.setenv(error_reporting.STOPPED_FILE, str(tmp_path / "nowhere" / "stopped"))
    assert error_reporting.stop_exit_code() == EXIT_STOPPED


# Fakes of Slurm's commands. srun runs its command as one task.
COMMANDS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "echo n1",
}


def test_batch_script_reads_the_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = written(tmp_path, 'case "$*" in *train*) touch "$SELECTRON_STOPPED_FILE";; esac')
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(["bash", str(job.script)], env=dict(os.environ), capture_output=True, text=True, check=False)
    assert (done.returncode, [event.description for event in read_job_events(job)]) == (
        EXIT_STOPPED,
        ["begun on n1", "stopped"],
    )
    assert not list(job.folder.glob("stopped-*"))


def test_exit_code_of_a_stopped_script(tmp_path: Path) -> None:
    """Stopped scripts exit with a code that `&&` and an afterok dependency treat as failure."""
    with start_job(written(tmp_path, "exit 75")) as process:
        assert process.wait(60) == EXIT_STOPPED
    assert status_of(tmp_path / "run").standing == "stopped"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("[ $name = b ] && exit 75 || exit 0", EXIT_STOPPED),
        ("[ $name = b ] && exit 75; [ $name = c ] && exit 3; exit 0", 1),
        ("[ $name = b ] && exit 2; exit 0", 1),
        ("exit 0", 0),
    ],
    ids=["one is stopped", "one is stopped, one fails", "one is refused", "all finish"],
)
def test_sweep_with_stopped_runs(tmp_path: Path, program: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_of(tmp_path, program, list("abc")).run(1, parallel=3) == code
    assert ("the same command continues them" in capsys.readouterr().err) == (code == EXIT_STOPPED)


def test_exit_codes_are_in_the_help() -> None:
    command = [sys.executable, "-m", "megatron_ext.cli", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "75        train, launch --local, sweep --local, prepare: stopped on request" in help_text
