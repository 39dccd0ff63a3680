"""Quickstart model on 2 and 4 nodes of a real Slurm, four processes in all: same results as on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, curve, must_run
from slurm_cluster import SlurmCluster, missing
from slurm_runs import CLI, finished, job_events

from megatron_ext.launch.job import list_jobs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]

QUICKSTART = ROOT / "examples" / "quickstart.yaml"
STEPS, PROCESSES = 3, 4
FIELDS = [f"training.steps={STEPS}", "training.evaluate_every=0", "optimizer.warmup_steps=1"]
FIELDS += ["training.global_batch_size=8", "training.micro_batch_size=2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=4, cpus=2)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fields(data: Path, runs: Path) -> list[str]:
    return [*FIELDS, f"data.path={data}", f"run.dir={runs}"]


@pytest.fixture(scope="module")
def one_machine(fields: list[str], runs: Path) -> Path:
    """Folder of the run on one machine."""
    must_run(QUICKSTART, [*fields, "run.name=one_machine"], processes=PROCESSES)
    return runs / "one_machine"


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_train_as_one_machine(
    cluster: SlurmCluster, fields: list[str], runs: Path, one_machine: Path, nodes: int
) -> None:
    """Launch on two nodes with the pre-flight check, which is on by default. On four nodes skip it to save time."""
    # The nodes are one machine with few, busy processors, so measured bandwidths are meaningless.
    look = ["--min-bandwidth-fraction", "0"] if nodes == 2 else ["--no-preflight"]
    where = ["--nodes", str(nodes), "--processes-per-node", str(PROCESSES // nodes), "--time", "10"]
    cluster.run(*CLI, "launch", str(QUICKSTART), *fields, f"run.name=nodes{nodes}", *where, *look)
    folder = finished(cluster, runs / f"nodes{nodes}")
    (job,) = list_jobs(folder)
    looked_at = [json.loads(path.read_text())["verdict"]["bad"] for path in job.folder.glob("preflight-*.json")]
    assert looked_at == ([{}] if nodes == 2 else [])
    assert job_events(folder) == [f"begun on {','.join(f'n{node + 1}' for node in range(nodes))}", "finished"]
    assert curve(folder) == curve(one_machine)
    assert len(curve(folder)) == STEPS
