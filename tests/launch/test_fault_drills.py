"""Faults on a cluster: each run ends bit-identical to an undisturbed one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from drills import (
    DRILLS,
    HANG_SECONDS,
    WATCH,
    Drill,
    cluster_for_drills,
    fill_disk,
    lengthen,
    perform,
    small_disk,
)
from launching import curve, records, write_config
from sabotaged import program
from slurm_cluster import SlurmCluster, missing
from slurm_runs import STEPS, finished, happened, launched, number, state, wait_for, wait_for_step

from megatron_ext.launch.job import jobs_of
from megatron_ext.launch.status import events_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Small disk, mounted before the nodes start so that they see it."""
    with small_disk(tmp_path_factory.mktemp("small") / "disk") as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[SlurmCluster]:
    started = cluster_for_drills(tmp_path_factory.mktemp("slurm") / "cluster")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("drills")
    return write_config(folder, data, folder / "runs")


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, config: Path) -> Path:
    """Folder of a finished, undisturbed run."""
    return finished(cluster, launched(cluster, config, "undisturbed", processes_per_node=1))


@pytest.mark.parametrize("drill", DRILLS, ids=[drill.name for drill in DRILLS])
def test_a_drill_leaves_no_trace(cluster: SlurmCluster, config: Path, undisturbed: Path, drill: Drill) -> None:
    course = perform(cluster, config, drill)
    assert curve(course.folder) == curve(undisturbed)
    assert len(curve(course.folder)) == STEPS
    assert all(event.time for event in events_of(jobs_of(course.folder)[-1]))
    begun = [event for event in happened(course.folder) if event == "begun on n1,n2"]
    assert len(begun) == (2 if drill.is_outage else 1), happened(course.folder)
    if drill.is_outage:  # only the steps since the newest checkpoint are lost
        assert course.newest is not None
        assert course.first == course.newest + 1 - drill.goes_back
    log = jobs_of(course.folder)[-1].log.read_text()
    if drill.fields == WATCH:
        assert_noticed_by_the_watch(log)
    if "corrupted" in drill.name:
        assert "is damaged" in log
    if drill.since:
        expected = ["begun on n1,n2", "asked to stop by USR1", "asked to stop by TERM", "its time is up", "starts anew"]
        assert happened(course.folder)[: len(expected)] == expected
    if drill.sabotage == "nan_once":
        assert [record["decision"] for record in records(course.folder, "decisions.jsonl")] == ["again", "again"]


def assert_noticed_by_the_watch(log: str) -> None:
    """Check that a rank prints its stack, and before Slurm detects that the node is gone, if it does."""
    watch, stack = f"Timeout (0:00:{HANG_SECONDS:02})!", log.find("in train_step")
    assert watch in log
    assert log.index(watch) < stack
    assert "DUE TO NODE FAILURE" not in log[:stack]


def test_the_time_limit(cluster: SlurmCluster, config: Path, undisturbed: Path) -> None:
    """Slurm itself sends USR1 within a minute. The next start has enough time."""
    slow = ["--time", "1", "--save-before", "20", "--python", str(program(config.parent, "slow_start"))]
    folder = launched(cluster, config, "time-limit", processes_per_node=1, options=slow)
    wait_for(folder, lambda: "asked to stop by USR1" in happened(folder))
    lengthen(cluster, folder)
    finished(cluster, folder)
    first, asked, ended, *then = happened(folder)
    assert (first, asked) == ("begun on n1,n2", "asked to stop by USR1")
    # Slurm may warn as early as 12 s after the start. On a busy machine the ranks have no handler yet, and the warning
    # kills them. If it kills one first, srun ends the others by TERM. srun's exit code is the largest of theirs.
    assert ended in [f"ended with exit code {code}" for code in (75, 128 + signal.SIGUSR1, 128 + signal.SIGTERM)]
    assert then == ["starts anew", "begun on n1,n2", "finished"]
    assert curve(folder) == curve(undisturbed)


def test_a_scancel_after_the_warning_ends_the_job(cluster: SlurmCluster, config: Path) -> None:
    """scancel sends the same signal as a time limit, here to a run that ends only by SIGKILL."""
    stuck = ["--time", "10", "--python", str(program(config.parent, "stuck_once"))]
    folder = launched(cluster, config, "cancelled", processes_per_node=1, options=stuck)
    wait_for_step(folder, 8)
    cluster.run("scancel", "--batch", "--signal=USR1", number(folder))
    wait_for(folder, lambda: "asked to stop by USR1" in happened(folder))
    cluster.run("scancel", number(folder))
    wait_for(folder, lambda: state(cluster, folder) == "CANCELLED")
    events = happened(folder)
    assert "asked to stop by TERM" in events
    assert not {"its time is up", "starts anew"} & set(events)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_disk_that_is_full_during_a_checkpoint(
    cluster: SlurmCluster, data: Path, disk: Path, tmp_path: Path, undisturbed: Path, asynchronous: str
) -> None:
    """The job ends with a one-line error, and the run resumes when there is space."""
    config = write_config(tmp_path, data, disk)
    fields = [f"training.async_checkpoints={asynchronous}"]
    course = fill_disk(cluster, config, disk, f"full-{asynchronous}", fields)
    refused = events_of(jobs_of(course.folder)[0])[-1].what
    # While a background checkpoint fills the disk, writing a step's record may fail first.
    assert "cannot be saved" in refused or (asynchronous == "true" and "cannot be written" in refused)
    assert "make room and start again with --resume" in refused
    assert course.newest is not None
    assert course.first == course.newest + 1
    assert curve(course.folder) == curve(undisturbed)
    shutil.rmtree(course.folder)  # the disk is small
