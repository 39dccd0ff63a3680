"""Concurrent calls launch a run only once."""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.commands import launch as command
from megatron_ext.config.schema import DataConfig, RunConfig, RunSection
from megatron_ext.launch import array, job, slurm
from megatron_ext.launch.job import Job, acquire_local_lock, hold_submission_locks, list_jobs, next_folder, write_job
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.slurm import JobState
from megatron_ext.launch.sweep import Sweep
from megatron_ext.run_folder.lock import FOLDER, RunLock, acquire
from megatron_ext.run_folder.process_identity import this_process
from megatron_ext.utils.errors import UserError

CALLS = 4


class FakeSlurm:
    """Fake of Slurm whose jobs stay pending for ever. Submission takes a moment."""

    def __init__(self) -> None:
        self.submitted: list[Path] = []

    def submit(self, script: Path) -> str:
        time.sleep(0.02)
        self.submitted.append(script)
        return str(len(self.submitted))

    def job_state(self, number: str) -> JobState | None:
        return JobState("PENDING", "", "") if int(number.split("_")[0]) <= len(self.submitted) else None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(slurm, "submit", fake.submit)
    monkeypatch.setattr(slurm, "job_state", fake.job_state)
    monkeypatch.setattr(slurm, "numbers_by_script", dict)
    monkeypatch.setattr(command, "check_cluster", lambda *_: None)
    monkeypatch.setattr(job, "PACKAGES", ())  # skip copying the code
    monkeypatch.setattr(shutil, "which", lambda name: name)
    (tmp_path / "data").mkdir()
    return fake


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["run.yaml"])


def config_of(tmp_path: Path, name: str = "a") -> RunConfig:
    return RunConfig(
        data=DataConfig(path=str(tmp_path / "data")), run=RunSection(dir=str(tmp_path / "runs"), name=name)
    )


def at_once(call: Callable[[], object], calls: int = CALLS) -> list[object]:
    """Call a function in threads that start together. Return the results, including any `UserError`."""
    barrier, results = threading.Barrier(calls), list[object]()

    def one() -> None:
        barrier.wait()
        try:
            results.append(call())
        except UserError as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("round_", range(5))
def test_one_of_concurrent_launches_submits(tmp_path: Path, fake: FakeSlurm, round_: int) -> None:
    config, args = config_of(tmp_path), arguments()
    results = at_once(lambda: command.launch(args, config, lambda: None))
    assert [result for result in results if not isinstance(result, UserError)] == [0]
    for error in (result for result in results if isinstance(result, UserError)):
        assert "is held by process" in str(error) or "has job 1 (pending)" in str(error)
    assert len(fake.submitted) == 1
    assert [one.number for one in list_jobs(tmp_path / "runs" / "a")] == ["1"]


def test_concurrent_sweeps_submit_each_run_once(tmp_path: Path, fake: FakeSlurm) -> None:
    configs = {name: config_of(tmp_path, name) for name in ("a", "b")}

    def sweep() -> None:
        resources = Resources(nodes=1, job_name="sizes")
        Sweep(tmp_path / "runs", configs, resources, "python3").submit(None)

    results = at_once(sweep)
    for error in (result for result in results if result is not None):
        assert "the launch of" in str(error)
        assert "is held by process" in str(error)
    assert len(fake.submitted) == 1
    assert [one.number for name in "ab" for one in list_jobs(tmp_path / "runs" / name)] == ["1_0", "1_1"]


def test_concurrent_launch_is_named(tmp_path: Path, fake: FakeSlurm) -> None:
    folder, me = tmp_path / "runs" / "a", this_process()
    with hold_submission_locks(folder), pytest.raises(UserError) as error:
        command.launch(arguments(), config_of(tmp_path), lambda: None)
    assert str(error.value).startswith(f"the launch of {folder}: is held by process {me.pid} on {me.host}, since ")
    assert fake.submitted == []


@pytest.mark.parametrize("local", [None, 1])
def test_run_trained_by_a_process_is_not_launched(tmp_path: Path, fake: FakeSlurm, local: int | None) -> None:
    folder, args = tmp_path / "runs" / "a", arguments()
    args.local = local
    lock = acquire(folder / FOLDER, str(folder))
    with pytest.raises(UserError) as error:
        command.launch(args, config_of(tmp_path), lambda: None)
    assert str(error.value).startswith(f"run.name: {folder} is trained by {lock.holder}; its last sign of life is ")
    assert list_jobs(folder) == []


def held_by_job(folder: Path, number: str) -> RunLock:
    elsewhere = dataclasses.replace(this_process(), host="n2", pids="another", job=number)
    return acquire(folder / FOLDER, str(folder), process=elsewhere)


def test_lock_left_by_an_ended_job_is_taken_over(tmp_path: Path, fake: FakeSlurm) -> None:
    held_by_job(tmp_path / "runs" / "a", "77")  # Slurm has forgotten this job
    assert command.launch(arguments(), config_of(tmp_path), lambda: None) == 0


def test_concurrent_jobs_get_different_folders(tmp_path: Path, fake: FakeSlurm) -> None:
    resources = Resources(nodes=1, job_name="a")
    written = at_once(lambda: write_job(config_of(tmp_path), tmp_path / "runs" / "a", resources, "python3"), 8)
    folders = sorted(int(one.folder.name) for one in written if isinstance(one, Job))
    assert folders == list(range(1, 9))
    arrays = at_once(lambda: array.write_array(tmp_path, [], resources, parallel=None, after=None), 8)
    assert len({one.folder for one in arrays if isinstance(one, array.Array)}) == 8
    assert next_folder(tmp_path / "runs" / "a" / "launch").name == "9"


def test_run_that_another_process_looks_at_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`selectron status` holds a shared lock while it looks, for seconds if its process is delayed."""
    folder, waits = tmp_path / "run", list[float]()
    first = acquire_local_lock(folder)
    assert first is not None
    os.close(first)
    looking = os.open(folder / "launch" / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 100:
            os.close(looking)

    monkeypatch.setattr(job.time, "sleep", wait)
    held = acquire_local_lock(folder)
    assert held is not None
    assert len(waits) == 100
    assert acquire_local_lock(folder) is None
    os.close(held)
    assert len(waits) == 100
