"""Faults on a cluster: each run ends bit-identical to an undisturbed one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import whole_run
from drills import (
    DRILL_FIELDS,
    HANG_SECONDS,
    SERIES,
    Course,
    Drill,
    Series,
    cluster_for_drills,
    fill_disk,
    launched_series,
    perform,
    small_disk,
)
from launching import ROOT, curve, records, write_config
from rank_server import program
from sabotaged import holding_file, stop_holding
from slurm_cluster import PATH, SlurmCluster, missing
from slurm_runs import CLI, FIELDS, POLL_SECONDS, STEPS, first_steps, job_events, number, release

from megatron_ext.launch.job import list_jobs
from megatron_ext.launch.status import read_job_events
from megatron_ext.run_folder.launch_events import read_events

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Small disk, mounted before the nodes start so that they see it."""
    with small_disk(tmp_path_factory.mktemp("small") / "disk") as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[SlurmCluster]:
    with cluster_for_drills(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("drills")
    return write_config(folder, data, folder / "runs")


@pytest.fixture(scope="module")
def undisturbed(pool: Any, config: Path) -> dict[int, Path]:
    """Folders of finished runs without faults on this machine, by number of ranks."""
    for ranks in (1, 2):
        pool.run(whole_run.run, ranks, config, [*FIELDS, *DRILL_FIELDS, f"run.name=undisturbed{ranks}"])
    return {ranks: config.parent / "runs" / f"undisturbed{ranks}" for ranks in (1, 2)}


def assert_shown_as_finished(cluster: SlurmCluster, folder: Path, starts: int) -> None:
    """Check the outputs of `selectron logs` and `selectron status`."""
    (last,) = cluster.run(*CLI, "logs", str(folder), "--lines", "1").splitlines()
    assert last.endswith(f"finished: {STEPS} steps, {STEPS * 256:,} tokens, in {folder}")
    row = [cell.strip() for cell in cluster.run(*CLI, "status", str(folder)).splitlines()[2].split("|")]
    assert row[1:6] == [folder.name, number(folder), "completed", str(starts), f"{STEPS} of {STEPS}"]


def assert_no_trace(folder: Path, series: Series, courses: list[Course], undisturbed: Path) -> None:
    """Check that a series of drills has left no trace in its run."""
    assert curve(folder) == curve(undisturbed)
    assert len(curve(folder)) == STEPS
    assert all(event.time for event in read_job_events(list_jobs(folder)[-1]))
    outages = [(d, course) for d, course in zip(series.drills, courses, strict=True) if d.is_outage]
    begun = [event for event in job_events(folder) if event.startswith("begun on ")]
    assert len(begun) == len(outages) + 1, job_events(folder)
    # Only the steps since the newest checkpoint are lost.
    kept = [(course.newest or 0) - drill.goes_back for drill, course in outages]
    assert all(course.newest for _, course in outages)
    assert first_steps(folder) == [1, *(step + 1 for step in kept)]
    for drill, course in outages:
        assert_noticed(drill, course)


def assert_noticed(drill: Drill, course: Course) -> None:
    assert course.events[: len(drill.expected)] == list(drill.expected), (drill.name, course.events)
    if "run.hang_timeout" in drill.noticed_by:
        assert_noticed_by_the_watch(course.log)
    if "corrupted" in drill.name:
        assert "is damaged" in course.log


def assert_noticed_by_the_watch(log: str) -> None:
    """Check that a rank prints its stack, and before Slurm detects that the node is gone, if it does."""
    watch, stack = f"Timeout (0:00:{HANG_SECONDS:02})!", log.find("in _attempt")
    assert watch in log
    assert log.index(watch) < stack
    assert "DUE TO NODE FAILURE" not in log[:stack]


def test_drills_leave_no_trace(tmp_path: Path, config: Path, undisturbed: dict[int, Path]) -> None:
    """Perform the series concurrently, each on its own cluster, because they mostly wait for Slurm or the watchdog."""
    with ExitStack() as stack:
        clusters = [stack.enter_context(cluster_for_drills(tmp_path / s.name, s.slurmd_seconds)) for s in SERIES]
        folders = [launched_series(cluster, config, s) for cluster, s in zip(clusters, SERIES, strict=True)]
        with ThreadPoolExecutor() as pool:
            courses = list(pool.map(perform, clusters, folders, SERIES))
        assert_shown_as_finished(clusters[1], folders[1], starts=len(SERIES[1].drills) + 1)
    for folder, series, of_series in zip(folders, SERIES, courses, strict=True):
        assert_no_trace(folder, series, of_series, undisturbed[series.nodes])
    assert [record["decision"] for record in records(folders[0], "decisions.jsonl")] == ["again", "again"]


def test_full_disk_during_a_checkpoint(
    cluster: SlurmCluster, data: Path, disk: Path, tmp_path: Path, undisturbed: dict[int, Path]
) -> None:
    """The job ends with a one-line error, and the run resumes when there is space."""
    folder, courses = fill_disk(cluster, write_config(tmp_path, data, disk), disk, ["true", "false"])
    for course, is_asynchronous in zip(courses, [True, False], strict=True):
        refused = course.events[-1]
        # While a background checkpoint fills the disk, writing a step's record may fail first.
        assert "cannot be saved" in refused or (is_asynchronous and "cannot be written" in refused)
        assert "free disk space and start again with --resume" in refused
        assert course.newest
    assert first_steps(folder) == [1, *((course.newest or 0) + 1 for course in courses)]
    assert curve(folder) == curve(undisturbed[1])
    shutil.rmtree(folder)  # the disk is small


def test_template_submitted_by_hand(
    cluster: SlurmCluster,
    config: Path,
    undisturbed: dict[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run `sbatch slurm/train.sbatch` unmodified, with Selectron on the nodes and a signal before the time limit."""
    program(tmp_path / "python3")
    monkeypatch.chdir(tmp_path)  # folder of events and log
    found = [f"PATH={tmp_path}:{PATH}", f"PYTHONPATH={ROOT}"]
    options = ["--parsable", "--nodes=1", "--ntasks-per-node=1", str(ROOT / "slurm" / "train.sbatch"), str(config)]
    job = cluster.run("env", *found, "sbatch", *options, *FIELDS, *DRILL_FIELDS, "run.name=by_hand").strip()
    folder = config.parent / "runs" / "by_hand"

    def notes() -> list[str]:
        return [event.description for event in read_events(tmp_path)]

    def is_past(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, (notes(), (tmp_path / f"selectron-{job}.log").read_text())
            time.sleep(POLL_SECONDS)

    is_past(holding_file(folder).exists)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    is_past(lambda: release(cluster, job))
    stop_holding(folder)
    is_past(lambda: notes()[-1:] == ["finished"])
    begun, asked, ended, *again = notes()
    assert [begun, asked, *again] == ["begun on n1", "asked to stop by USR1", "starts anew", begun, "finished"]
    assert ended == "ended with exit code 75"  # stopped; srun itself does not report this code
    assert curve(folder) == curve(undisturbed[1])
