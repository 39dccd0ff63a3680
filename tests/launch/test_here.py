"""Command `selectron launch --local` and its log, with a shell program instead of training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import ForkedProcess, command
from launching import environment, write_config

from megatron_ext.cli import main
from megatron_ext.launch.job import Job, is_locally_locked
from megatron_ext.launch.status import read_job_events

CLI = [sys.executable, "-m", "megatron_ext.cli"]

SAYS = 'echo said; echo "of errors" >&2; [ -z "$CODE" ] || exit "$CODE"'

WAITS = """
sleep 60 >/dev/null 2>&1 &
trap 'kill $!; echo asked to stop >&2; exit 75' TERM USR1
echo said; wait
"""


@pytest.fixture
def launched(tmp_path: Path) -> Callable[[str], list[str]]:
    """Function that returns the arguments to launch a program locally as the run `runs/run`."""
    (tmp_path / "data").mkdir()
    config = write_config(tmp_path, tmp_path / "data", tmp_path / "runs")
    python = tmp_path / "python"

    def arguments(program: str) -> list[str]:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
        given = ["--local", "1", "--no-preflight", "--requeues", "0", "--python", str(python)]
        return ["launch", str(config), *given]

    return arguments


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


def job_of(run: Path, number: int = 1) -> Job:
    return Job(run / "launch" / str(number))


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_said(run: Path, text: str) -> bool:
    log = job_of(run).log
    return log.exists() and text in log.read_text()


def started(arguments: list[str], stdout: int | None = None) -> ForkedProcess:
    return ForkedProcess(command, arguments, environment(), stdout)


def test_output_is_printed_and_logged(
    launched: Callable[[str], list[str]], run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(launched(SAYS)) == 0
    job, captured = job_of(run), capfd.readouterr()
    follow = f"follow: selectron logs {run} --follow; selectron status {run}\n"
    assert captured.out == "said\n"
    assert captured.err == f"events: {job.folder}/events.tsv\nlog:    {job.log}\n{follow}of errors\n"
    assert sorted(job.log.read_text().splitlines()) == ["of errors", "said"]
    assert not is_locally_locked(run)
    done = subprocess.run([*CLI, "logs", str(run)], env=environment(), capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["of errors", "said"]


def test_exit_code_and_log_of_each_launch(
    launched: Callable[[str], list[str]], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, code in enumerate((2, 3), start=1):
        monkeypatch.setenv("CODE", str(code))
        assert main([*launched(SAYS), "--resume=auto"]) == code
        assert "said\n" in job_of(run, number).log.read_text()
    assert [event.description for event in read_job_events(job_of(run))] == ["begun with 1 processes", "refused"]
    assert "after 0 restarts, the maximum number\n" in job_of(run, 2).log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=str)
def test_a_signal_stops_the_run(launched: Callable[[str], list[str]], run: Path, number: signal.Signals) -> None:
    with started(launched(WAITS)) as process:
        wait_for(lambda: has_said(run, "said\n"))
        process.send_signal(number)
        assert_stopped(process, run)


def assert_stopped(process: ForkedProcess, run: Path) -> None:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75, err
    assert (out, err.splitlines()[-1]) == ("said\n", "asked to stop")
    assert has_said(run, "asked to stop\n")
    noted = [event.description for event in read_job_events(job_of(run))]
    assert noted == ["begun with 1 processes", "asked to stop by TERM", "stopped"]


def test_log_is_followed_until_sigterm(launched: Callable[[str], list[str]], run: Path) -> None:
    with started(launched(WAITS)) as process:
        wait_for(lambda: has_said(run, "said\n"))
        with started(["logs", str(run), "--follow"]) as follower:
            assert follower.stdout.readline() == "said\n"
            process.send_signal(signal.SIGTERM)
            assert follower.stdout.readline() == "asked to stop\n"
            follower.kill()
        assert_stopped(process, run)


def test_run_continues_without_its_terminal_or_launcher(
    launched: Callable[[str], list[str]], run: Path, tmp_path: Path
) -> None:
    program = f"echo said; until [ -e {tmp_path}/more ]; do sleep 0.05; done; echo more"
    read, write = os.pipe()
    with started(launched(program), stdout=write) as process:
        os.close(write)
        wait_for(lambda: has_said(run, "said\n"))
        os.close(read)
        process.kill()
        process.wait(timeout=240)
        assert is_locally_locked(run)
        (tmp_path / "more").touch()
        wait_for(lambda: has_said(run, "more\n"))
    wait_for(lambda: not is_locally_locked(run))
    assert [event.description for event in read_job_events(job_of(run))][-1] == "finished"
