"""Batch scripts checked by Slurm against a declared cluster of 64 nodes with 8 GPUs each. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, missing

from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.launch import slurm
from megatron_ext.launch.array import write_array
from megatron_ext.launch.job import write_job
from megatron_ext.launch.resources import Resources
from megatron_ext.utils import git_info
from megatron_ext.utils.errors import UserError

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "never")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    declared = SlurmCluster(folder, nodes=64, cpus=96, declared_gpus=8, max_time="3-0")
    yield declared
    declared.stop()


@pytest.fixture(autouse=True)
def asked_there(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Slurm's commands on the login host of the cluster."""
    monkeypatch.setattr(slurm, "run_command", cluster.run)


def test_the_whole_cluster_is_accepted(cluster: SlurmCluster, tmp_path: Path) -> None:
    whole = Resources(
        nodes=64, gpus_per_node=8, partition="main", time="3-00:00:00", job_name="whole", extra_options=["--exclusive"]
    )
    whole.check()
    whole.check_cluster(slurm.partitions())
    job = write_job(RunConfig(data=DataConfig(path="data")), tmp_path, whole, "python3")
    cluster.run("sbatch", "--test-only", str(job.script))


@pytest.mark.parametrize("container", [None, "registry/image:1", "image.sif"])
def test_scripts_of_jobs_and_arrays_are_accepted(cluster: SlurmCluster, tmp_path: Path, container: str | None) -> None:
    runs = tmp_path / "my runs"
    given = Resources(nodes=32, gpus_per_node=8, cpus_per_task=12, job_name="sizes", container=container)
    jobs = [write_job(RunConfig(data=DataConfig(path="data")), runs / name, given, "python3") for name in "ab"]
    array = write_array(runs, jobs, given, parallel=1, after=None)
    for script in (jobs[0].script, array.script):
        cluster.run("sbatch", "--test-only", str(script))


@pytest.mark.parametrize("more", ["--exclude=n1", "--array=0-5000", "--no-such-option"])
def test_rejection_by_slurm_writes_no_script(more: str) -> None:
    whole = Resources(nodes=64, gpus_per_node=8, job_name="whole", extra_options=[more])
    whole.check_cluster(slurm.partitions())
    with pytest.raises(RuntimeError, match=r"not available|Invalid job array|unrecognized option|Invalid directive"):
        slurm.check_options(whole.sbatch_options())


def test_quoted_value_is_one_option(cluster: SlurmCluster) -> None:
    whole = Resources(nodes=64, gpus_per_node=8, job_name="whole", extra_options=["--comment=two words"])
    slurm.check_options(whole.sbatch_options())


def test_template_is_accepted_unchanged(cluster: SlurmCluster) -> None:
    options = ["--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8"]
    cluster.run(
        "sbatch", "--test-only", *options, str(git_info.ROOT / "slurm" / "train.sbatch"), "examples/110m_2k.yaml"
    )


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"nodes": 65}, "--nodes: 65 is too many: partition main has 64 nodes; give 64 or fewer"),
        ({"gpus_per_node": 9}, "--gpus-per-node: 9 is too many: partition main has 8 GPUs per node; give 8 or fewer"),
        ({"partition": "gpux"}, "--partition: there is no partition gpux; choose from main"),
        ({"time": "4-0"}, "--time: 4-0 is too long: partition main has a limit of 3-00:00:00; give 3-00:00:00 or less"),
    ],
)
def test_request_that_slurm_rejects_is_rejected_first(
    cluster: SlurmCluster, tmp_path: Path, fields: dict[str, Any], refusal: str
) -> None:
    resources = Resources(**{"nodes": 1, "job_name": "run"} | fields)
    with pytest.raises(UserError) as caught:
        resources.check_cluster(slurm.partitions())
    assert str(caught.value) == refusal
    job = write_job(RunConfig(data=DataConfig(path="data")), tmp_path, resources, "python3")
    with pytest.raises(RuntimeError, match=r"allocation failure|invalid partition"):
        cluster.run("sbatch", "--test-only", str(job.script))
