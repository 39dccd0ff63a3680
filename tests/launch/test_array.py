"""Slurm arrays: written files and recorded events, without Slurm. `test_slurm_jobs.py` runs a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.launch import slurm
from megatron_ext.launch.array import Array, restore_job_numbers, write_array
from megatron_ext.launch.job import Job, copy_code, newest_job, write_job
from megatron_ext.launch.resources import Resources

RESOURCES = Resources(nodes=2, processes_per_node=4, job_name="sizes", time="10")


def array_of(runs: Path, names: list[str], *, parallel: int | None = None, after: str | None = None) -> Array:
    code = runs / "launch" / "code" / "1"
    code = code if code.exists() else copy_code(code)
    program = runs / "python"
    program.write_text('#!/bin/sh\necho "trains: $*"\n')
    program.chmod(0o755)
    jobs = [
        write_job(RunConfig(data=DataConfig(path="x")), runs / name, RESOURCES, str(program), code=code)
        for name in names
    ]
    return write_array(runs, jobs, RESOURCES, parallel=parallel, after=after)


def test_sbatch_options_of_a_request(tmp_path: Path) -> None:
    options = {
        line.removeprefix("#SBATCH --")
        for line in array_of(tmp_path, ["a", "b", "c"], parallel=2, after="7_1").script.read_text().splitlines()
        if line.startswith("#SBATCH")
    }
    expected = {"array=0-2%2", "dependency=afterok:7_1", "kill-on-invalid-dep=yes", "nodes=2", "ntasks-per-node=4"}
    assert (
        expected | {"job-name=sizes", "requeue", "time=10", f"output={tmp_path}/launch/arrays/1/array.log"} <= options
    )
    more = array_of(tmp_path, ["d"])
    assert more.folder == tmp_path / "launch" / "arrays" / "2"
    assert "#SBATCH --array=0-0\n" in more.script.read_text()
    assert "dependency" not in more.script.read_text()


def test_array_task_runs_the_job_of_its_run(tmp_path: Path) -> None:
    """Start the task as Slurm would, but without SLURM_JOB_ID, so that the job's script does not call srun."""
    array = array_of(tmp_path, ["a", "b c"])
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    given |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "40"}
    done = subprocess.run(["bash", str(array.script)], env=given, capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
    first, second = array.jobs
    assert (first.number, second.number) == (None, "40_1")
    assert second.log.name == "job-40_1.log"
    assert "trains: -m megatron_ext.cli train" in second.log.read_text()
    assert (second.folder / "code").resolve() == tmp_path / "launch" / "code" / "1"
    assert (second.folder / "code" / "megatron_ext" / "cli.py").exists()


def test_missing_job_numbers_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, lost, never = array_of(tmp_path, ["a"]), array_of(tmp_path, ["b", "c"]), array_of(tmp_path, ["d"])
    noted.write_number("5")
    monkeypatch.setattr(slurm, "numbers_by_script", lambda: {str(lost.script): "6", "/else/job.sbatch": "7"})
    restore_job_numbers(tmp_path)
    assert [job.number for array in (noted, lost, never) for job in array.jobs] == ["5_0", "6_0", "6_1", None]
    assert newest_job(tmp_path / "d") is None
    assert newest_job(tmp_path / "c") == Job(tmp_path / "c" / "launch" / "1")
