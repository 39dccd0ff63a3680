"""Command `selectron launch --local` as a user calls it, including the pre-flight check before training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import whole_run
from corpora import prepared
from launching import ROOT, STEPS, curve, environment, write_config

from megatron_ext.launch.job import list_jobs
from megatron_ext.launch.status import read_job_events


@pytest.mark.slow
def test_launched_run_equals_a_run_of_train(pool: Any, tmp_path: Path) -> None:
    config, runs = write_config(tmp_path, prepared(tmp_path), tmp_path / "runs"), tmp_path / "runs"
    command = [sys.executable, "-m", "megatron_ext.cli", "launch", str(config), "run.name=launched", "--local", "2"]
    given = {name: value for name, value in environment().items() if not name.startswith("SLURM")}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    (job,) = list_jobs(runs / "launched")
    follow = f"follow: selectron logs {runs}/launched --follow; selectron status {runs}/launched\n"
    assert f"events: {job.folder}/events.tsv\nlog:    {job.log}\n{follow}" in done.stderr
    assert "pre-flight of 1 node" in done.stdout
    assert f"finished: {STEPS} steps" in done.stderr
    log = job.log.read_text()
    assert set(log.splitlines()) == set((done.stdout + done.stderr.partition(follow)[2]).splitlines())
    assert [event.description for event in read_job_events(job)] == ["begun with 2 processes", "finished"]
    pool.run(whole_run.run, 2, config, ["run.name=trained"])
    assert curve(runs / "launched") == curve(runs / "trained")
    assert len(curve(runs / "trained")) == STEPS
