"""Sweep on a real Slurm, killed and resumed in its middle, then fitted and reported by one command."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpora import prepared
from launching import records, write_config
from rank_server import program, ranks_of
from sabotaged import holding_file, stop_holding
from slurm_cluster import SlurmCluster, missing
from slurm_runs import call, job_events, state, wait_for

from megatron_ext.cli import main
from megatron_ext.launch.job import list_jobs
from megatron_ext.launch.status import is_finished

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]

SWEEP = """
config: config.yaml
fields:
  model.pattern: top1_chunk*2
  training.micro_batch_size: 4
  training.evaluate_every: 12
  training.steps: 12
  training.checkpoint_every: 6
  optimizer.lr: 3e-3
axes:
  size: {small: {model.hidden_size: 16}, middle: {model.hidden_size: 32}, large: {model.hidden_size: 64}}
runs:
  small-long: {model.hidden_size: 16, training.steps: 24}
  middle-long: {model.hidden_size: 32, training.steps: 24}
"""
NAMES = ["small", "middle", "large", "small-long", "middle-long"]
HELD = "middle-long"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=2, cpus=1)
    yield started
    started.stop()


def test_killed_sweep_is_resumed_and_fitted(cluster: SlurmCluster, tmp_path: Path) -> None:
    config = write_config(tmp_path, prepared(tmp_path), tmp_path / "runs")
    sweep, folder = tmp_path / "sizes.yaml", tmp_path / "runs" / "sizes"
    sweep.write_text(SWEEP)
    python = str(program(tmp_path / "python"))
    command = ["sweep", str(sweep), "--processes-per-node", "1", "--time", "10", "--no-preflight", "--python", python]
    # One run is held in a step after its first checkpoint, the others are not.
    folder.mkdir(parents=True)
    for name in NAMES:
        if name != HELD:
            stop_holding(folder / name)
    assert len(call(cluster, *command).splitlines()) == len(NAMES) + 1
    assert json.loads((folder / "sweep.json").read_text())["runs"] == NAMES
    assert config.exists()
    runs = [folder / name for name in NAMES]

    # In the middle, kill a rank, and then cancel all unfinished runs.
    wait_for(runs[0], lambda: sum(map(is_finished, runs)) >= 2)
    held = folder / HELD
    wait_for(held, holding_file(held).exists)
    os.kill(ranks_of(held)[0], signal.SIGKILL)
    wait_for(held, lambda: "starts anew" in job_events(held))
    # Slurm loses a cancel that arrives while it requeues the job.
    wait_for(held, lambda: state(cluster, held) == "PENDING")
    call(cluster, "cancel", str(folder))
    before = [run for run in runs if is_finished(run)]
    assert 2 <= len(before) < len(NAMES)
    wait_for(held, lambda: not cluster.run("squeue", "--noheader"))  # they may still write a checkpoint
    stop_holding(held)

    printed = call(cluster, *command)
    assert all(f"{run.name}: job" not in printed for run in before)
    for run in runs:
        wait_for(run, lambda run=run: is_finished(run), seconds=300)
    assert [len(list_jobs(run)) for run in before] == [1] * len(before)
    # The killed run resumed from a checkpoint, and has each step once.
    first = int(re.search(r"(\d+)/24", list_jobs(held)[-1].log.read_text())[1])
    assert 6 <= first < 24
    assert [record["step"] for record in records(held)] == list(range(1, 25))

    assert main(["report", str(folder), "--fit", "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert all(run.name in page for run in runs)
    with (tmp_path / "report" / "scaling" / "points.csv").open() as file:
        points = list(csv.DictReader(file))
    assert len(points) == len(NAMES)
    assert len({point["params"] for point in points}) == 3
    assert {int(point["tokens"]) for point in points} == {12 * 256, 24 * 256}
    fit = json.loads((tmp_path / "report" / "scaling" / "fit.json").read_text())
    (law,) = fit["mixers"].values()
    assert law["untold"] == ["E", "B", "beta"]  # two token counts
    assert set(law["intervals"].values()) == {None}  # five points leave no residual
    assert "two token counts: E, B and beta cannot be determined" in page
