"""Resources of a job, and requests that are refused before submission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.launch import slurm
from megatron_ext.launch.resources import Resources, parse_time
from megatron_ext.launch.slurm import JobState, Partition
from megatron_ext.utils.errors import UserError

CLUSTER = {
    "gpu": Partition("gpu", 64, 8, 128, "1-00:00:00", False),
    "cpu": Partition("cpu", 4, 0, 2, "infinite", True),
}


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:05", 7205),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
    ],
)
def test_time_formats_of_slurm(time: str, expected: int) -> None:
    assert parse_time(time) == expected


@pytest.mark.parametrize("time", ["x", "1h", "1:2:3:4", "-5", "1-", "1.5"])
def test_invalid_time(time: str) -> None:
    with pytest.raises(ValueError, match=time):
        parse_time(time)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"nodes": 0}, "--nodes: 0 is less than 1; give 1 or more"),
        ({"cpus_per_task": 0}, "--cpus-per-task: 0 is less than 1; give 1 or more"),
        ({"gpus_per_node": -1}, "--gpus-per-node: -1 is less than 1; give 1 or more"),
        (
            {"gpus_per_node": 8, "processes_per_node": 4},
            "--processes-per-node: 4 cannot be combined with --gpus-per-node, which starts a process per GPU; "
            "omit one of them",
        ),
        (
            {"job_name": "my run"},
            "--job-name: 'my run' is not a valid file name; use letters, digits, '.', '_' and '-'",
        ),
        ({"time": "1h"}, "--time: '1h' is not in a time format of Slurm; give minutes, H:MM:SS or D-HH:MM:SS"),
        (
            {"time": "3"},
            "--time: 3 is not longer than --save-before, 180 s; increase it, or reduce --save-before",
        ),
        (
            {"extra_options": ["account=x"]},
            "--sbatch: 'account=x' is not an sbatch option; give one like --sbatch=--account=mine",
        ),
        (
            {"container": "images/none.sqsh"},
            "--container: there is no file images/none.sqsh; give an image file or the name of an image in a registry",
        ),
    ],
)
def test_resources_that_no_cluster_accepts(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        Resources(**{"nodes": 1, "job_name": "run"} | fields).check()
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"partition": "gpux"}, "--partition: there is no partition gpux; choose from cpu, gpu"),
        ({"nodes": 5}, "--nodes: 5 is too many: partition cpu has 4 nodes; give 4 or fewer"),
        (
            {"partition": "gpu", "gpus_per_node": 16},
            "--gpus-per-node: 16 is too many: partition gpu has 8 GPUs per node; give 8 or fewer",
        ),
        (
            {"gpus_per_node": 1},
            "--gpus-per-node: 1 is too many: partition cpu has 0 GPUs per node; give --processes-per-node instead",
        ),
        (
            {"processes_per_node": 3},
            "--processes-per-node: 3 is too many: partition cpu has 2 CPUs per node; give 2 or fewer",
        ),
        (
            {"cpus_per_task": 3},
            "--cpus-per-task: 3 for one process is too many: partition cpu has 2 CPUs per node; give 2 or fewer",
        ),
        (
            {"partition": "gpu", "gpus_per_node": 8, "cpus_per_task": 17},
            "--cpus-per-task: 17 for each of 8 processes is too many: partition gpu has 128 CPUs per node; "
            "give 16 or fewer",
        ),
        (
            {"partition": "gpu", "time": "2-00"},
            "--time: 2-00 is too long: partition gpu has a limit of 1-00:00:00; give 1-00:00:00 or less",
        ),
    ],
)
def test_resources_that_this_cluster_lacks(fields: dict[str, Any], line: str) -> None:
    resources = Resources(**{"nodes": 1, "job_name": "run"} | fields)
    resources.check()
    with pytest.raises(UserError) as caught:
        resources.check_cluster(CLUSTER)
    assert str(caught.value) == line


def test_complete_request() -> None:
    fields: dict[str, Any] = {"partition": "gpu", "gpus_per_node": 8, "time": "1-00", "container": "registry/image:1"}
    whole = Resources(nodes=64, job_name="run", cpus_per_task=16, extra_options=["--account=mine"], **fields)
    whole.check()
    whole.check_cluster(CLUSTER)
    assert whole.sbatch_options() == [
        "--nodes=64",
        "--ntasks-per-node=8",
        "--partition=gpu",
        "--time=1-00",
        "--gpus-per-node=8",
        "--cpus-per-task=16",
        "--signal=B:USR1@180",
        "--account=mine",
    ]


def test_no_default_partition() -> None:
    with pytest.raises(UserError, match="--partition: the cluster has no default partition; choose from gpu"):
        Resources(nodes=1, job_name="run").check_cluster({"gpu": CLUSTER["gpu"]})


def says(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, body: str) -> None:
    """Install a fake Slurm program that prints a fixed answer."""
    path = folder / program
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_partition_with_different_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "gpu*|60|gpu:8|128+|2-00:00:00\ngpu*|4|gpu:h200:4(S:0-1)|64|2-00:00:00\ncpu|2|(null)|32|infinite"
    says(tmp_path, monkeypatch, "sinfo", f"printf '{lines}\n'")
    assert slurm.partitions() == {
        "gpu": Partition("gpu", 64, 8, 128, "2-00:00:00", True),
        "cpu": Partition("cpu", 2, 0, 32, "infinite", False),
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo 'RUNNING|None|n[1-2]|/a|b/job.sbatch'", JobState("RUNNING", "", "n[1-2]", "/a|b/job.sbatch")),
        ("echo 'PENDING|Resources||(null)'", JobState("PENDING", "Resources", "", "(null)")),
        ("true", None),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", None),
    ],
)
def test_the_state_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: JobState | None
) -> None:
    says(tmp_path, monkeypatch, "squeue", body)
    assert slurm.job_state("7") == expected


def test_slurms_message_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(tmp_path, monkeypatch, "squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match=r"^squeue: refused: .*Unable to contact slurm controller; correct this"):
        slurm.job_state("7")


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^squeue: is not installed on this machine; run it on a login node"):
        slurm.job_state("7")
    with pytest.raises(UserError, match="there is no sbatch on this machine; run it on a login node, or use --local N"):
        slurm.check_installed()
