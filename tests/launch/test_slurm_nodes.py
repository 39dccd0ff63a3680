"""Quickstart model on nodes of a real Slurm, four processes in all: same results as on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import whole_run
from covering import cases
from launching import ROOT, curve
from slurm_cluster import SlurmCluster, missing
from slurm_runs import CLI, finished, job_events

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]

QUICKSTART = ROOT / "examples" / "quickstart.yaml"
STEPS, PROCESSES = 3, 4
NODES = cases(every=[2, 4], default=[2])  # of two processes, or of one
FIELDS = [f"training.steps={STEPS}", "training.evaluate_every=0", "optimizer.warmup_steps=1"]
FIELDS += ["training.global_batch_size=8", "training.micro_batch_size=2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=max(NODES), cpus=2)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fields(data: Path, runs: Path) -> list[str]:
    return [*FIELDS, f"data.path={data}", f"run.dir={runs}"]


@pytest.fixture(scope="module")
def one_machine(pool: Any, fields: list[str], runs: Path) -> Path:
    """Folder of the run on one machine."""
    pool.run(whole_run.run, PROCESSES, QUICKSTART, [*fields, "run.name=one_machine"])
    return runs / "one_machine"


@pytest.mark.parametrize("nodes", NODES)
def test_nodes_train_as_one_machine(
    cluster: SlurmCluster, fields: list[str], runs: Path, one_machine: Path, nodes: int
) -> None:
    where = ["--nodes", str(nodes), "--processes-per-node", str(PROCESSES // nodes), "--time", "10", "--no-preflight"]
    cluster.run(*CLI, "launch", str(QUICKSTART), *fields, f"run.name=nodes{nodes}", *where)
    folder = finished(cluster, runs / f"nodes{nodes}")
    assert job_events(folder) == [f"begun on {','.join(f'n{node + 1}' for node in range(nodes))}", "finished"]
    assert curve(folder) == curve(one_machine)
    assert len(curve(folder)) == STEPS
