"""Quickstart model on 2 and 4 nodes of a real Slurm with two processes each: same results as on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, curve, must_run
from slurm_cluster import SlurmCluster, missing
from slurm_runs import CLI, finished, happened

from megatron_ext.launch.job import jobs_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]

QUICKSTART = ROOT / "examples" / "quickstart.yaml"
STEPS = 9
FIELDS = [f"training.steps={STEPS}", "training.evaluate_every=0", "training.micro_batch_size=4"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=4, cpus=2)
    yield started
    started.stop()


def launched(cluster: SlurmCluster, fields: list[str], runs: Path, nodes: int) -> Path:
    """Launch with the pre-flight check, which is on by default. On four nodes skip it to save time."""
    # The nodes are one machine with few, busy processors, so measured bandwidths are meaningless.
    look = ["--min-bandwidth-fraction", "0"] if nodes == 2 else ["--no-preflight"]
    where = ["--nodes", str(nodes), "--processes-per-node", "2", "--time", "10"]
    cluster.run(*CLI, "launch", str(QUICKSTART), *fields, "run.name=nodes", *where, *look)
    return runs / "nodes"


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_train_as_one_machine(cluster: SlurmCluster, data: Path, tmp_path: Path, nodes: int) -> None:
    fields = [*FIELDS, f"data.path={data}", f"run.dir={tmp_path}"]
    folder = finished(cluster, launched(cluster, fields, tmp_path, nodes))
    (job,) = jobs_of(folder)
    looked_at = [json.loads(path.read_text())["verdict"]["bad"] for path in job.folder.glob("preflight-*.json")]
    assert looked_at == ([{}] if nodes == 2 else [])
    assert happened(folder) == [f"begun on {','.join(f'n{node + 1}' for node in range(nodes))}", "finished"]
    must_run(QUICKSTART, [*fields, "run.name=one_machine"], processes=2 * nodes)
    assert curve(folder) == curve(tmp_path / "one_machine")
    assert len(curve(folder)) == STEPS
