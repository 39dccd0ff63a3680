"""Commands `selectron launch --local`, with the pre-flight check before training, and `selectron sweep --local`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import whole_run
from launching import STEPS, curve, environment, records, write_config

from megatron_ext.cli import main
from megatron_ext.launch.job import list_jobs
from megatron_ext.launch.status import read_job_events, run_folders, status_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _outside_a_launcher() -> Iterator[None]:
    given = {name: value for name, value in environment().items() if not name.startswith("SLURM")}
    with patch.dict(os.environ, given, clear=True):
        yield


def test_launched_run_equals_a_run_of_train(
    pool: Any, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, runs = write_config(tmp_path, data, tmp_path / "runs"), tmp_path / "runs"
    code, shown = main(["launch", str(config), "run.name=launched", "--local", "2"]), capfd.readouterr()
    assert code == 0, shown.err
    (job,) = list_jobs(runs / "launched")
    follow = f"follow: selectron logs {runs}/launched --follow; selectron status {runs}/launched\n"
    assert f"events: {job.folder}/events.tsv\nlog:    {job.log}\n{follow}" in shown.err
    assert "pre-flight of 1 node" in shown.out
    assert f"finished: {STEPS} steps" in shown.err
    log = job.log.read_text()
    assert set(log.splitlines()) == set((shown.out + shown.err.partition(follow)[2]).splitlines())
    assert [event.description for event in read_job_events(job)] == ["begun with 2 processes", "finished"]
    pool.run(whole_run.run, 2, config, ["run.name=trained"])
    assert curve(runs / "launched") == curve(runs / "trained")
    assert len(curve(runs / "trained")) == STEPS


def test_sweep_is_trained_and_reported(data: Path, tmp_path: Path) -> None:
    """Two training lengths from one run with a constant learning rate until its end."""
    config, folder = write_config(tmp_path, data, tmp_path / "runs"), tmp_path / "runs" / "sizes"
    runs = f"{{short: {{training.steps: 6, run.branch_from: {folder}/long/checkpoints/step_4}}, long: {{}}}}"
    rate = "training.steps: 8, optimizer.schedule: wsd, optimizer.decay_steps: 2"
    fields = f"{{{rate}, training.checkpoint_every: 2, training.keep_every: 4}}"
    sweep = tmp_path / "sizes.yaml"
    sweep.write_text(f"config: {config.name}\nfields: {fields}\nruns: {runs}")
    options = ["--local", "1", "--parallel", "2", "--no-preflight", "training.evaluate_every=2"]
    assert main(["sweep", str(sweep), *options]) == 0
    short, long = (records(folder / name) for name in ("short", "long"))
    assert [len(short), len(long)] == [6, 8]
    assert [record["loss"] for record in short[:4]] == [record["loss"] for record in long[:4]]
    assert short[5]["lr"] < long[5]["lr"]
    assert [status_of(run).standing for run in run_folders([folder])] == ["finished"] * 2
    assert main(["report", str(folder), "--output", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "index.html").exists()
