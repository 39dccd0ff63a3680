"""Copied run folders: the job and process of the original, named in the copy, are not attributed to the copy."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.commands import launch as command
from megatron_ext.commands import logs as logs_command
from megatron_ext.launch import slurm, status
from megatron_ext.launch.job import Job
from megatron_ext.launch.ownership import belongs_to_other_folder
from megatron_ext.launch.slurm import JobState
from megatron_ext.launch.status import status_of
from megatron_ext.run_folder.lock import FOLDER, acquire
from megatron_ext.run_folder.lock_file import lock_state
from megatron_ext.run_folder.process_identity import this_process
from megatron_ext.utils.errors import UserError


def job_at(run: Path, number: str) -> Job:
    job = Job(run / "launch" / "1")
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text("training: {steps: 50}\n")
    job.script.write_text("#!/bin/sh\n")
    (job.folder / "events.tsv").write_text(f"2026-01-01T00:00:00Z\t{number}\t0\tbegun on n1\n")
    job.write_number(number)
    job.log.write_text("said\n")
    return job


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Ids of cancelled jobs. Job 7 is running, and its script is that of the original."""
    runs = JobState("RUNNING", "", "n1", str(tmp_path / "run" / "launch" / "1" / "job.sbatch"))
    numbers: list[str] = []
    monkeypatch.setattr(slurm, "job_state", {"7": runs}.get)
    monkeypatch.setattr(status, "job_state", {"7": runs}.get)
    monkeypatch.setattr(slurm, "cancel", numbers.append)
    return numbers


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy of the run folder beside the original, as `cp -r` makes it."""
    job_at(tmp_path / "run", "7")
    return shutil.copytree(tmp_path / "run", tmp_path / "copy")


def test_the_job_of_a_copy_is_not_cancelled(
    tmp_path: Path, copy: Path, cancelled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", str(copy)]) == 2
    script = tmp_path / "run" / "launch" / "1" / "job.sbatch"
    message = f"selectron: error: {copy}: job 7 belongs to {script}, not to this folder, which was copied or moved; "
    assert capsys.readouterr().err == f"{message}cancel that run, or use `scancel 7` to cancel that job\n"
    assert cancelled == []
    (tmp_path / "link").symlink_to(tmp_path / "run")  # same run under another path
    assert main(["cancel", str(tmp_path / "link")]) == 0
    assert cancelled == ["7"]


def test_copy_with_links_is_not_the_original(tmp_path: Path, copy: Path, cancelled: list[str]) -> None:
    hard, soft = tmp_path / "hard", tmp_path / "soft"
    shutil.copytree(tmp_path / "run", hard, copy_function=os.link)
    soft.mkdir()
    (soft / "launch").symlink_to(tmp_path / "run" / "launch")
    assert [main(["cancel", str(folder)]) for folder in (hard, soft)] == [2, 2]
    assert cancelled == []


@pytest.mark.parametrize("script", ["(null)", "", "bash", "/gone/launch/1/job.sbatch"])
def test_job_number_of_another_script_is_not_the_runs_job(tmp_path: Path, script: str) -> None:
    assert belongs_to_other_folder(job_at(tmp_path / "run", "7"), JobState("RUNNING", "", "n1", script))


def test_array_task_belongs_to_one_run(tmp_path: Path) -> None:
    """All tasks of a sweep run one script. The array's list assigns tasks to runs."""
    runs = tmp_path / "runs"
    jobs = [job_at(runs / name, f"9_{task}") for task, name in enumerate("ab")]
    array = runs / "launch" / "arrays" / "1"
    array.mkdir(parents=True)
    (array / "jobs.json").write_text(json.dumps([str(job.folder) for job in jobs]))
    state = JobState("RUNNING", "", "n1", str(array / "array.sbatch"))
    assert [belongs_to_other_folder(job, state) for job in jobs] == [False, False]
    shutil.copytree(runs / "a", runs / "c")  # copy of one run
    shutil.copytree(runs, tmp_path / "all")  # copy of the whole sweep
    others = [Job(folder / "launch" / "1") for folder in (runs / "c", tmp_path / "all" / "a")]
    assert [belongs_to_other_folder(job, state) for job in others] == [True, True]
    jobs[1].write_number("9_2")  # no such task in the array
    assert belongs_to_other_folder(jobs[1], state)


def test_status_and_logs_report_a_copy(
    tmp_path: Path,
    copy: Path,
    cancelled: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [(one.standing, one.state) for one in (status_of(tmp_path / "run"), status_of(copy))] == [
        ("running", "running"),
        ("stopped", "copied"),
    ]
    script = tmp_path / "run" / "launch" / "1" / "job.sbatch"
    named = f"{copy}/launch/1/job_id: job 7 belongs to {script}: this folder was copied or moved"
    assert status_of(copy).problems == (named,)
    monkeypatch.setattr(logs_command, "_tail", lambda *_: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    main(["logs", str(copy)])
    message = f"selectron: {copy}: job 7 belongs to {script}; this log is a copy that no longer grows\n"
    assert capsys.readouterr().err == message
    main(["logs", str(tmp_path / "run")])
    assert capsys.readouterr().err == ""


def test_copy_can_be_launched_while_the_original_runs(
    tmp_path: Path, copy: Path, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "numbers_by_script", dict)
    command.check_no_live_job(copy)
    with pytest.raises(UserError, match=r"run has job 7 \(running\)"):
        command.check_no_live_job(tmp_path / "run")


def test_copied_lock_is_not_held_by_the_original_process(tmp_path: Path) -> None:
    lock = acquire(tmp_path / "run" / FOLDER, "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    state = lock_state(tmp_path / "copy" / FOLDER)
    assert state is not None
    assert not state.is_held
    command.check_not_trained(tmp_path / "copy")
    acquire(tmp_path / "copy" / FOLDER, "copy", print_line=lambda line: pytest.fail(line)).release()
    lock.check()  # the original's lock is unaffected
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UserError, match="is held by process"):
        acquire(tmp_path / "link" / FOLDER, "link")


def test_lock_in_a_moved_folder_is_held(tmp_path: Path) -> None:
    acquire(tmp_path / "run" / FOLDER, "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="is held by process"):
        acquire(tmp_path / "moved" / FOLDER, "moved")
    other = dataclasses.replace(this_process(), pid=2**22 + 1)
    acquire(tmp_path / "run" / FOLDER, "run", process=other)  # another run took the folder: another token
    with pytest.raises(UserError, match="is held by process"):
        acquire(tmp_path / "moved" / FOLDER, "moved")
