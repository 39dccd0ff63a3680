"""Pre-flight check on a real Slurm of three nodes, one of which is bad. A shell program replaces training."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from corpora import prepared
from launching import write_config
from slurm_cluster import FAILING, SlurmCluster, missing
from slurm_runs import POLL_SECONDS, call, release

from megatron_ext.launch.job import Job, list_jobs
from megatron_ext.launch.status import read_job_events

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]

PROGRAM = """#!/bin/sh
# After a requeue all nodes report. A short limit for one that does not must not end the check of a slow one.
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || longer="--node-timeout 300"
[ "$3" != preflight ] || exec {python} "$@" $longer
echo "trained on $SLURMD_NODENAME"
"""
# The three nodes are one machine with two busy processors, so measured bandwidths are meaningless.
ANY_SPEED = ["--min-bandwidth-fraction", "0"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(
        tmp_path_factory.mktemp("slurm") / "cluster", nodes=3, cpus=2, slurmd_timeout=FAILING, kill_wait=2
    )
    yield started
    started.stop()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looked_at")
    program = folder / "program"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return write_config(folder, prepared(folder), folder / "runs")


def launched(cluster: SlurmCluster, config: Path, name: str, *options: str, temporary: str = "/tmp") -> Job:
    """Launch a run with one process per node."""
    program = ["--python", str(config.parent / "program")]
    with patch.dict(cluster.environment, TMPDIR=temporary):
        call(cluster, "launch", str(config), f"run.name={name}", *program, *ANY_SPEED, *options)
    (job,) = list_jobs(config.parent / "runs" / name)
    return job


def job_events(job: Job) -> list[str]:
    return [event.description for event in read_job_events(job)]


def wait_for(cluster: SlurmCluster, job: Job, condition: Callable[[list[str]], object]) -> list[str]:
    """Wait for a condition on a job's events. Release the job if Slurm holds it after a requeue."""
    end = time.monotonic() + 300
    while not condition(job_events(job)):
        assert time.monotonic() < end, (job_events(job), job.log.read_text() if job.log.exists() else "no log")
        release(cluster, str(job.number))
        time.sleep(POLL_SECONDS)
    return job_events(job)


def left(job: Job, start: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / f"preflight-{job.number}-{start}.json").read_text())
    return found


def test_node_with_a_full_disk_is_excluded(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    cluster.on_node("n2", "mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path))
    try:
        job = launched(cluster, config, "full", "--nodes", "2", "--min-tmp", "50MB", temporary=str(tmp_path))
        events = wait_for(cluster, job, lambda notes: notes[-1:] == ["finished"])
    finally:
        cluster.on_node("n2", "umount", str(tmp_path))
    assert events == [
        "begun on n1,n2",
        f"bad node n2: 4.19 MB free in {tmp_path}, less than 50 MB",
        "ended with exit code 3",
        "starts anew without n2",
        "begun on n1,n3",
        "finished",
    ]
    log = job.log.read_text()
    assert re.search(r"^\| n2 \|.* \| 4.19 MB free in ", log, re.MULTILINE)
    assert sorted(re.findall("^trained on (.*)$", log, re.MULTILINE)) == ["n1", "n3"]
    assert list(left(job)["verdict"]["bad"]) == ["n2"]
    second = left(job, 1)
    assert second["verdict"]["bad"] == {}
    assert [link["pair"] for link in second["links"]] == [["n1", "n3"]] * 2
    assert all(link["bandwidth"] > 0 and not link["error"] for link in second["links"])
    clock = second["clocks"]["n3"]
    assert abs(clock["ahead"]) <= clock["error"] + 1e-6  # it is the same clock


# Routing rules of the bad node: it can reach only slurmd's clients, slurmctld, srun and the store of the first node.
RULES = [
    "sport 6818 lookup main",
    "dport 6817 lookup main",
    "dport 61000-65000 lookup main",
    "dport 20000-29999 lookup main",
    "blackhole",
]


def test_node_that_reaches_no_other_is_named(cluster: SlurmCluster, config: Path) -> None:
    """The node reaches Slurm and the first node's store, but no other process, as with a broken second network."""
    priorities = [str(10 + i) for i in range(len(RULES))]
    for priority, rule in zip(priorities, RULES, strict=True):
        cluster.on_node("n2", "ip", "rule", "add", "priority", priority, "ipproto", "tcp", *rule.split())
    try:
        fields = ["training.global_batch_size=6", "training.micro_batch_size=1"]
        job = launched(cluster, config, "alone", *fields, "--nodes", "3", "--pair-timeout", "2")
        events = wait_for(
            cluster,
            job,
            lambda notes: [note for note in notes if "given up" in note or "fin" in note],
        )
    finally:
        for priority in priorities:
            cluster.on_node("n2", "ip", "rule", "del", "priority", priority)
    begun, bad, ended, given_up = events
    assert begun == "begun on n1,n2,n3"
    assert bad.startswith("bad node n2: with ")
    assert ended == "ended with exit code 3"
    assert given_up == "given up: fewer than the required 3 nodes remain without n2"
    assert "trained on" not in job.log.read_text()
    assert {tuple(link["pair"]) for link in left(job)["links"] if not link["error"]} == {("n3", "n1")}


def test_a_node_that_cannot_be_reached_at_all(cluster: SlurmCluster, config: Path) -> None:
    """The link goes down before Slurm notices: while the job is held in the queue, which is released afterwards."""
    while cluster.nodes_in("idle") != {"n1", "n2", "n3"}:  # the previous job may still be ending
        time.sleep(0.1)
    cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    job = launched(cluster, config, "unreached", "--nodes", "2", "--node-timeout", "10")
    cluster.run("ip", "link", "set", "vn2", "down")
    try:
        cluster.run("scontrol", "update", "PartitionName=main", "State=UP")
        events = wait_for(cluster, job, lambda notes: notes[-1:] == ["finished"])
    finally:
        cluster.run("ip", "link", "set", "vn2", "up")
    assert events[0] == "begun on n1,n2"
    assert events[1].startswith("bad node n2: ")
    assert events[3:] == ["starts anew without n2", "begun on n1,n3", "finished"]
