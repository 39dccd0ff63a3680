"""Fault drills: inject faults into runs on clusters, and check that each run ends as if undisturbed.

    PYTHONPATH=tests:tests/distributed:tests/launch python -m drills [SERIES ...]

prints a table of the times to detection and to resumed training, for all series of faults or for those named.
`test_fault_drills.py` compares each run with an undisturbed one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import faults
from corpora import prepared
from faults import Act, nothing
from launching import curve, records, write_config
from rank_server import program
from sabotaged import CHECKPOINT_EVERY, NAN_ONCE, STUCK_ONCE, holding_file, stop_holding
from slurm_cluster import SlurmCluster
from slurm_runs import FIELDS, LAUNCH, POLL_SECONDS, call, finished, job_events, launched, released, state, wait_for

from megatron_ext.checkpoint.folder import CheckpointFolder
from megatron_ext.launch.job import list_jobs
from megatron_ext.utils.markdown import table

HANG_SECONDS = 15
SLURMD_SECONDS = 10
LATE_SLURMD_SECONDS = 30
"""Slurm pings nodes at a third of this interval. It notices a cut link after 20 s or more, later than the watchdog."""
KILL_SECONDS = 10
"""Time between SIGTERM and SIGKILL, long enough for a job on a busy machine."""
MIB = 2**20
DRILL_FIELDS = (
    f"training.checkpoint_every={CHECKPOINT_EVERY}",
    "training.micro_batch_size=2",
    "model.pattern=top1_chunk,gated_deltanet",
)
FULL_DISK = "full disk during a checkpoint"


@dataclass(frozen=True)
class Drill:
    """Fault to inject.

    Attributes:
        name: name in the table.
        noticed_by: detector named in the table.
        cause: function that injects the fault while the run is held in a step; `nothing`: `sabotaged` injects it.
        repair: function that removes the fault once it has been detected.
        is_outage: whether the job ends because of the fault and is requeued.
        ends_hold: whether the run is released at once; otherwise it is held until a signal arrives or the job has
            ended.
        since: event of the job from which the time to detection is measured; empty: measured from the cause.
        goes_back: steps that the run resumes before the newest checkpoint.
        expected: events of the job from the fault on; empty: not checked.
    """

    name: str
    noticed_by: str
    cause: Act
    repair: Act = nothing
    is_outage: bool = True
    ends_hold: bool = True
    since: str = ""
    goes_back: int = 0
    expected: Sequence[str] = ()


@dataclass(frozen=True)
class Series:
    """Drills on one run, one after the other. Each start of the run is disturbed once, and the last one finishes.

    Attributes:
        name: name of the run.
        drills: in this order.
        fields: overrides of the run's configuration.
        faults: names of faults of `sabotaged`.
        slurmd_seconds: seconds after which the cluster considers a silent node down.
        nodes: number of nodes of the run, each with one rank.
    """

    name: str
    drills: Sequence[Drill]
    fields: Sequence[str] = ()
    faults: Sequence[str] = ()
    slurmd_seconds: int = SLURMD_SECONDS
    nodes: int = 2


@dataclass(frozen=True)
class Course:
    """Result of a drill.

    Attributes:
        detected: seconds from the fault to its detection; None if the job did not end.
        resumed: seconds from the release of the requeued job to its first step, so without the time for which Slurm
            holds the job; None if the job did not end.
        newest: step of the newest checkpoint while the job was down; None if the job did not end.
        events: events of the job from the fault to the next start.
        log: log of the job from the fault to the next start.
    """

    detected: float | None = None
    resumed: float | None = None
    newest: int | None = None
    events: Sequence[str] = ()
    log: str = ""


_BY_WATCH, _BY_SLURM = f"`run.hang_timeout` {HANG_SECONDS}", f"slurmctld, `SlurmdTimeout` {SLURMD_SECONDS}"
_WARNED = "asked to stop by USR1"

ENDED = Series(
    "ended",
    [
        Drill("NaN in one rank's gradients", "the step's norm", nothing, is_outage=False),
        Drill(
            "corrupted newest checkpoint, SIGKILL of a rank",
            "srun, checksums",
            faults.kill_a_rank,
            faults.damage_newest_checkpoint,
            goes_back=CHECKPOINT_EVERY,
        ),
        Drill("preempted by another job", "slurmctld", faults.preempt, ends_hold=False),
        Drill("power cut of the batch node", _BY_SLURM, faults.cut_power("n1"), faults.start("n1")),
        Drill("power cut of another node", _BY_SLURM, faults.cut_power("n2"), faults.start("n2")),
        Drill("slurmctld killed and started", "", lambda c, _: c.restart_controller(), is_outage=False),
    ],
    faults=[NAN_ONCE],
)
HANGING = Series(
    "hanging",
    [
        Drill("a rank stopped (SIGSTOP)", _BY_WATCH, faults.stop_a_rank),
        Drill("cut link, no FIN", _BY_WATCH, lambda c, _: c.cut_link("n2"), faults.start_anew("n2")),
    ],
    fields=(f"run.hang_timeout={HANG_SECONDS}",),
    slurmd_seconds=LATE_SLURMD_SECONDS,
)
LIMITED = Series(
    "limited",
    [
        Drill(
            "checkpoint before the time limit",
            "the job's script",
            faults.shorten,
            faults.lengthen_next_start,
            ends_hold=False,
            since=_WARNED,
            expected=[_WARNED, "ended with exit code 75", "starts anew"],
        ),
        Drill(
            "time limit in a step that does not end",
            "the job's script, by Slurm's SIGTERM",
            faults.shorten,
            faults.lengthen_next_start,
            ends_hold=False,
            since=_WARNED,
            expected=[_WARNED, "asked to stop by TERM", "its time is up", "starts anew"],
        ),
    ],
    # A background checkpoint is completed in a later step, which would never come here.
    fields=("training.async_checkpoints=false",),
    faults=[STUCK_ONCE],
    nodes=1,
)
SERIES = (ENDED, HANGING, LIMITED)


@contextlib.contextmanager
def cluster_for_drills(folder: Path, slurmd_seconds: int = SLURMD_SECONDS) -> Iterator[SlurmCluster]:
    """Context manager of a cluster of two nodes with limits as short as a busy machine permits."""
    limits = {"slurmd_timeout": slurmd_seconds, "kill_wait": KILL_SECONDS}
    cluster = SlurmCluster(folder, nodes=2, cpus=2, is_preempting=True, **limits)
    try:
        yield cluster
    finally:
        cluster.stop()


def launched_series(cluster: SlurmCluster, config: Path, series: Series) -> Path:
    """Launch the run of a series. Return its folder."""
    python = program(config.parent / series.name, series.faults)
    options = ["--time", "10", "--save-before", "20", "--python", str(python)]
    fields = [*DRILL_FIELDS, *series.fields]
    return launched(cluster, config, series.name, fields, nodes=series.nodes, processes_per_node=1, options=options)


def perform(cluster: SlurmCluster, folder: Path, series: Series) -> list[Course]:
    """Disturb a launched run by one drill after the other, and wait for its end."""
    courses = [_disturb(cluster, folder, drill) for drill in series.drills]
    stop_holding(folder)
    finished(cluster, folder)
    return courses


def _disturb(cluster: SlurmCluster, folder: Path, drill: Drill) -> Course:
    """Inject a fault into a run that is held in a step, and wait until it trains again."""
    if drill.cause is nothing:
        return Course()
    wait_for(folder, holding_file(folder).exists)
    inode, begins = _inode(folder), len(list_jobs(folder)[-1].log.read_text())
    seen, caused = len(job_events(folder)), time.monotonic()
    drill.cause(cluster, folder)
    if drill.ends_hold:
        holding_file(folder).unlink(missing_ok=True)
    if not drill.is_outage:
        return Course()
    fault = seen
    if drill.since:
        wait_for(folder, lambda: drill.since in job_events(folder)[seen:])
        seen, caused = job_events(folder).index(drill.since, seen) + 1, time.monotonic()
    wait_for(folder, lambda: len(job_events(folder)) > seen or state(cluster, folder) != "RUNNING", pause=POLL_SECONDS)
    detected = time.monotonic()
    wait_for(folder, lambda: state(cluster, folder) != "RUNNING", pause=POLL_SECONDS)
    drill.repair(cluster, folder)
    again, newest = _until_begun_anew(cluster, folder, inode)
    wait_for(folder, lambda: _has_trained(folder, newest - drill.goes_back))
    log, events = list_jobs(folder)[-1].log.read_text()[begins:], job_events(folder)[fault:]
    return Course(detected - caused, time.monotonic() - again, newest, events, log)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Context manager that mounts a disk of 32 MiB on a new folder. Nodes started later see it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(cluster: SlurmCluster, config: Path, disk: Path, values: Sequence[str]) -> tuple[Path, list[Course]]:
    """Launch a run of one rank and fill its disk, free space when its job has ended, and launch it again to resume.

    `Course.resumed` is measured from the next `selectron launch`.

    Args:
        cluster: cluster whose nodes see the disk.
        config: configuration of a run on the disk.
        disk: folder of a small disk, see `small_disk`.
        values: values of `training.async_checkpoints` in the starts during which the disk is full.
    """
    filler, folder = disk / "filler", disk / "full"
    fields = [*FIELDS, *DRILL_FIELDS, "training.keep_checkpoints=2", f"run.name={folder.name}"]
    python = program(config.parent / folder.name)
    command = [*LAUNCH, str(config), *fields, "--time", "10", "--python", str(python)]
    call(cluster, *command, f"training.async_checkpoints={values[0]}")

    def is_refused() -> bool:
        # The next checkpoint could take the place of an old one that is deleted after the disk was filled.
        _fill(filler)
        return job_events(folder)[-1].startswith("refused")

    courses = []
    for following in [*values[1:], "true"]:
        wait_for(folder, holding_file(folder).exists)
        wait_for(folder, lambda: _fill(filler))
        caused, inode = time.monotonic(), _inode(folder)
        holding_file(folder).unlink()
        wait_for(folder, is_refused)
        detected, newest, events = time.monotonic(), _newest(folder), job_events(folder)
        filler.unlink()
        wait_for(folder, lambda: state(cluster, folder) == "FAILED", pause=POLL_SECONDS)  # not "COMPLETING"
        again = time.monotonic()
        call(cluster, *command, f"training.async_checkpoints={following}", "--resume")
        wait_for(folder, lambda inode=inode: _inode(folder) != inode)
        wait_for(folder, lambda newest=newest: _has_trained(folder, newest or 0))
        courses.append(Course(detected - caused, time.monotonic() - again, newest, events))
    stop_holding(folder)
    return finished(cluster, folder), courses


def _fill(filler: Path) -> bool:
    """Extend a file over a disk's free space, except for room for some records. Return False if that fails.

    It fails if the space is taken meanwhile, or if no more than that room is free.
    """
    with filler.open("ab") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), file.tell(), shutil.disk_usage(filler.parent).free - MIB // 8)
        return True
    return False


def _newest(folder: Path) -> int | None:
    """Step of a run's newest checkpoint. Steps may be well ahead of a background checkpoint on busy cores."""
    return CheckpointFolder(folder / "checkpoints").latest()


def _inode(folder: Path) -> int:
    """Inode of a run's metrics file, which each start of its job replaces."""
    return (folder / "metrics.jsonl").stat().st_ino


def _until_begun_anew(cluster: SlurmCluster, folder: Path, inode: int) -> tuple[float, int]:
    """Wait until a new start replaces the metrics file. Return the release time and the newest checkpoint before."""
    again, newest = time.monotonic(), _newest(folder) or 0

    def has_begun_anew() -> bool:
        nonlocal again, newest
        if released(cluster, folder):  # may happen twice: Slurm and the job itself both requeue
            again = time.monotonic()
        latest = _newest(folder) or 0
        if _inode(folder) != inode:  # the latest checkpoint may be one of the new start
            return True
        # The previous start may still complete a checkpoint. The new one passes over a damaged one.
        newest = max(newest, latest)
        return False

    wait_for(folder, has_begun_anew, pause=POLL_SECONDS)
    return again, newest


def _has_trained(folder: Path, step: int) -> bool:
    """Return True once a start that resumed after this step has recorded one. It may already be held again."""
    found = records(folder)
    return bool(found) and found[-1]["step"] > step


HEADINGS = ("fault", "noticed by", "s to detection", "s from then to training", "same curve")


def main() -> None:
    """Print the table of drills."""
    named = sys.argv[1:]
    rows = []
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as disk:
        place = Path(name)
        data = prepared(place)
        config = write_config(place, data, place / "runs")
        with cluster_for_drills(place / "cluster") as cluster:
            undisturbed = {}
            for nodes in (1, 2):
                name = f"undisturbed{nodes}"
                run = launched(cluster, config, name, DRILL_FIELDS, nodes=nodes, processes_per_node=1)
                undisturbed[nodes] = curve(finished(cluster, run))
            if not named or "full" in named:
                (place / "full").mkdir()
                folder, courses = fill_disk(cluster, write_config(place / "full", data, disk), disk, ["true", "false"])
                rows += _rows([FULL_DISK] * 2, ["the checkpoint"] * 2, courses, curve(folder) == undisturbed[1])
        for series in (series for series in SERIES if not named or series.name in named):
            with cluster_for_drills(place / series.name, series.slurmd_seconds) as cluster:
                folder = launched_series(cluster, config, series)
                courses = perform(cluster, folder, series)
            names, detectors = [drill.name for drill in series.drills], [drill.noticed_by for drill in series.drills]
            rows += _rows(names, detectors, courses, curve(folder) == undisturbed[series.nodes])
    print("\n".join(table(HEADINGS, rows)))


def _rows(names: Sequence[str], detectors: Sequence[str], courses: Sequence[Course], is_same: bool) -> list[list[str]]:
    rows = []
    for name, noticed_by, course in zip(names, detectors, courses, strict=True):
        times = ["" if t is None else f"{t:.1f}" for t in (course.detected, course.resumed)]
        rows.append([name, noticed_by, *times, "yes" if is_same else "NO"])
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
