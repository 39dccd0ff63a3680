"""Fault drills: inject a fault into a run on a cluster, and check that the run ends as if undisturbed.

    PYTHONPATH=tests:tests/distributed:tests/launch python -m drills [FAULT ...]

prints a table of the times to detection and to resumed training, for all faults or for those named.
`test_fault_drills.py` compares each run with an undisturbed one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sabotaged
from corpora import prepared
from launching import curve, records, write_config
from slurm_cluster import SlurmCluster
from slurm_runs import (
    FIELDS,
    LAUNCH,
    finished,
    first_steps,
    happened,
    launched,
    number,
    ranks_of,
    released,
    state,
    wait_for,
)

from megatron_ext.checkpoint.folder import CheckpointFolder
from megatron_ext.utils.markdown import table

HANG_SECONDS = 15
SLURMD_SECONDS = 36
"""Slurm pings nodes at a third of this interval. It notices a cut link after 24 s or more, later than the watchdog."""
KILL_SECONDS = 10
"""Time between SIGTERM and SIGKILL, long enough for a job on a busy machine."""
LOOKS_AT_LIMITS = 30
"""Seconds between two checks of job time limits by Slurm. It is not configurable."""
CHECKPOINT_EVERY = 3
MIB = 2**20
FULL_DISK = "full disk during a checkpoint"

Act = Callable[[SlurmCluster, Path], object]
"""Function that acts on a cluster, or on the run in the given folder."""


def _nothing(cluster: SlurmCluster, folder: Path) -> None:
    """Do nothing: some faults pass by themselves."""


@dataclass(frozen=True)
class Drill:
    """Fault to inject.

    Attributes:
        name: name in the table.
        noticed_by: detector named in the table.
        cause: function that injects the fault in the middle of the run.
        hint: function that removes the fault once it has been detected.
        fields: overrides of the run's configuration.
        sabotage: key of `sabotaged.FAULTS`, or empty.
        is_outage: whether the job ends because of the fault and is requeued.
        since: event of the job from which the time to detection is measured; empty: measured from the cause.
        goes_back: steps that the run resumes before the newest checkpoint.
    """

    name: str
    noticed_by: str
    cause: Act
    hint: Act = _nothing
    fields: Sequence[str] = ()
    sabotage: str = ""
    is_outage: bool = True
    since: str = ""
    goes_back: int = 0


@dataclass(frozen=True)
class Course:
    """Result of a drill.

    Attributes:
        folder: folder of the finished run.
        detected: seconds from the fault to its detection; None if the job did not end.
        resumed: seconds from the release of the requeued job to its first step, so without the time for which Slurm
            holds the job; None if the job did not end.
        newest: step of the newest checkpoint while the job was down; None if the job did not end.
        first: first step recorded after the restart; None if the job did not end.
    """

    folder: Path
    detected: float | None = None
    resumed: float | None = None
    newest: int | None = None
    first: int | None = None


def kill_a_rank(cluster: SlurmCluster, folder: Path) -> None:
    """Kill a rank with SIGKILL, as the kernel does when memory runs out."""
    os.kill(ranks_of(folder)[-1], signal.SIGKILL)


def stop_a_rank(cluster: SlurmCluster, folder: Path) -> None:
    """Stop a rank, so that it neither ends nor makes progress."""
    os.kill(ranks_of(folder)[-1], signal.SIGSTOP)


def damage_newest_checkpoint(cluster: SlurmCluster, folder: Path) -> None:
    """Flip a bit of the largest file of the newest checkpoint."""
    checkpoints = folder / "checkpoints"
    newest = checkpoints / f"{(checkpoints / 'latest').read_text().strip()}"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def preempt(cluster: SlurmCluster, folder: Path) -> None:
    """Submit a job of another partition that takes the nodes for three seconds."""
    where = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    cluster.run("sbatch", *where, "--wrap=sleep 3")


def _signal(name: str) -> Act:
    return lambda cluster, folder: cluster.run("scancel", "--batch", f"--signal={name}", number(folder))


def shorten(cluster: SlurmCluster, folder: Path) -> None:
    """Set the job's end time to half a minute from now.

    Slurm checks time limits every half minute. It first warns of limits that expire before the next check, and ends the
    job at that check.
    """
    cluster.run("scontrol", "update", f"JobId={number(folder)}", f"EndTime=now+{LOOKS_AT_LIMITS + 1}")


def lengthen(cluster: SlurmCluster, folder: Path) -> None:
    """Give the next start of the job enough time."""
    cluster.run("scontrol", "update", f"JobId={number(folder)}", "TimeLimit=10")


def lengthen_next_start(cluster: SlurmCluster, folder: Path) -> None:
    """Do the same as `lengthen` for a job past its limit. Slurm accepts a new limit only once the job is pending."""
    wait_for(folder, lambda: state(cluster, folder) == "PENDING")
    lengthen(cluster, folder)


def mend_link(cluster: SlurmCluster, folder: Path) -> None:
    """Restore the link of the node, and wait until Slurm starts the job, two minutes after its end.

    Other drills shorten this wait. Here it is needed: for more than a minute the node may still report the end of the
    old step and end everything with the job's id. The step of the next start has the same id.
    """
    cluster.mend_link("n2")
    wait_for(folder, lambda: state(cluster, folder) == "RUNNING")


WATCH = (f"run.hang_timeout={HANG_SECONDS}",)
_BY_WATCH, _BY_SLURM = f"`run.hang_timeout` {HANG_SECONDS}", f"slurmctld, `SlurmdTimeout` {SLURMD_SECONDS}"

DRILLS = [
    Drill("SIGKILL of a rank", "srun", kill_a_rank),
    Drill("a rank stopped (SIGSTOP)", _BY_WATCH, stop_a_rank, fields=WATCH),
    Drill("USR1 before the limit", "the job's script", _signal("USR1")),
    Drill(
        "time limit in a step that does not end",
        "the job's script, by Slurm's SIGTERM",
        shorten,
        lengthen_next_start,
        # A background checkpoint is completed in a later step, which would never come here.
        fields=("training.async_checkpoints=false",),
        sabotage="stuck_once",
        since="asked to stop by USR1",
    ),
    Drill("preempted by another job", "slurmctld", preempt),
    Drill("power cut of the batch node", _BY_SLURM, lambda c, _: c.kill_node("n1"), lambda c, _: c.start_node("n1")),
    Drill("power cut of another node", _BY_SLURM, lambda c, _: c.kill_node("n2"), lambda c, _: c.start_node("n2")),
    Drill("cut link, no FIN", _BY_WATCH, lambda c, _: c.cut_link("n2"), mend_link, fields=WATCH),
    Drill(
        "corrupted newest checkpoint, SIGKILL of a rank",
        "srun, checksums",
        kill_a_rank,
        damage_newest_checkpoint,
        goes_back=CHECKPOINT_EVERY,
    ),
    Drill("slurmctld killed and started", "", lambda c, _: c.restart_controller(), is_outage=False),
    Drill("NaN in one rank's gradients", "the step's norm", _nothing, sabotage="nan_once", is_outage=False),
]


def cluster_for_drills(folder: Path) -> SlurmCluster:
    """Cluster of two nodes with limits as short as a busy machine permits."""
    limits = {"slurmd_timeout": SLURMD_SECONDS, "kill_wait": KILL_SECONDS}
    return SlurmCluster(folder, nodes=2, cpus=2, is_preempting=True, **limits)


def perform(cluster: SlurmCluster, config: Path, drill: Drill) -> Course:
    """Launch a run on two nodes, inject the fault in its middle, and wait for its end."""
    program = ["--python", str(sabotaged.program(config.parent, drill.sabotage))] if drill.sabotage else []
    name = "-".join(word for word in drill.name.lower().split() if word.isalnum())
    options = ["--time", "10", "--save-before", "20", *program]
    folder = launched(cluster, config, name, drill.fields, processes_per_node=1, options=options)
    wait_for(folder, lambda: _is_under_way(folder))
    inode = _inode(folder)
    seen, caused = len(happened(folder)), time.monotonic()
    drill.cause(cluster, folder)
    if drill.since:
        wait_for(folder, lambda: drill.since in happened(folder))
        seen, caused = happened(folder).index(drill.since) + 1, time.monotonic()
    if not drill.is_outage:
        return Course(finished(cluster, folder))
    wait_for(folder, lambda: len(happened(folder)) > seen or state(cluster, folder) != "RUNNING")
    detected = time.monotonic()
    wait_for(folder, lambda: state(cluster, folder) != "RUNNING")
    drill.hint(cluster, folder)
    again, newest = _until_begun_anew(cluster, folder, inode)
    kept = len(records(folder))
    wait_for(folder, lambda: len(records(folder)) > kept)
    resumed = time.monotonic()
    finished(cluster, folder)
    return Course(folder, detected - caused, resumed - again, newest, first_steps(folder)[-1])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Context manager that mounts a disk of 32 MiB on a new folder. Nodes started later see it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(cluster: SlurmCluster, config: Path, disk: Path, name: str, fields: Sequence[str] = ()) -> Course:
    """Launch a run, fill its disk in the middle, free space when its job has ended, and launch it again to resume.

    `Course.resumed` is measured from the second `selectron launch`.
    """
    fields = [*fields, "training.keep_checkpoints=2"]
    folder = launched(cluster, config, name, fields, processes_per_node=1, runs=disk)
    wait_for(folder, lambda: _is_under_way(folder))
    filler = disk / "filler"
    wait_for(folder, lambda: _is_filled(filler))
    caused = time.monotonic()
    wait_for(folder, lambda: happened(folder)[-1].startswith("refused"))
    detected, newest, inode = time.monotonic(), CheckpointFolder(folder / "checkpoints").latest(), _inode(folder)
    filler.unlink()
    options = ["--nodes", "2", "--processes-per-node", "1", "--time", "10", "--resume"]
    again = time.monotonic()
    cluster.run(*LAUNCH, str(config), *FIELDS, *fields, f"run.name={name}", *options)
    wait_for(folder, lambda: _inode(folder) != inode)
    kept = len(records(folder))
    wait_for(folder, lambda: len(records(folder)) > kept)
    resumed = time.monotonic()
    finished(cluster, folder)
    return Course(folder, detected - caused, resumed - again, newest, first_steps(folder)[-1])


def _is_filled(filler: Path) -> bool:
    """Fill a disk with a file, except for room for some records. Return False if the space is taken meanwhile."""
    with filler.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(filler.parent).free - MIB // 8)
        return True
    return False


def _is_under_way(folder: Path) -> bool:
    """Return True once a run is past its eighth step and has two checkpoints, of which one may be lost.

    Steps do not wait for a background checkpoint, and may be well ahead of it on busy cores.
    """
    saved = CheckpointFolder(folder / "checkpoints").latest() or 0
    return len(records(folder)) >= 8 and saved >= 2 * CHECKPOINT_EVERY


def _inode(folder: Path) -> int:
    """Inode of a run's metrics file, which each start of its job replaces."""
    return (folder / "metrics.jsonl").stat().st_ino


def _until_begun_anew(cluster: SlurmCluster, folder: Path, inode: int) -> tuple[float, int | None]:
    """Wait until a new start replaces the metrics file. Return the release time and the newest checkpoint before."""
    again, newest = time.monotonic(), None

    def has_begun_anew() -> bool:
        nonlocal again, newest
        if released(cluster, folder):  # may happen twice: Slurm and the job itself both requeue
            again = time.monotonic()
        before = CheckpointFolder(folder / "checkpoints").latest()
        if _inode(folder) != inode:
            return True
        newest = before  # the metrics file is still the old one, so the previous start wrote this checkpoint
        return False

    wait_for(folder, has_begun_anew)
    return again, newest


HEADINGS = ("fault", "noticed by", "s to detection", "s from then to training", "same curve")


def main() -> None:
    """Print the table of drills."""
    named = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as disk:
        place = Path(name)
        cluster = cluster_for_drills(place / "cluster")
        try:
            data = prepared(place)
            config = write_config(place, data, place / "runs")
            undisturbed = curve(finished(cluster, launched(cluster, config, "undisturbed", processes_per_node=1)))
            rows = []
            for drill in (drill for drill in DRILLS if not named or drill.name in named):
                rows.append(_row(drill.name, drill.noticed_by, perform(cluster, config, drill), undisturbed))
            if not named or FULL_DISK in named:
                (place / "full").mkdir()
                config = write_config(place / "full", data, disk)
                rows.append(_row(FULL_DISK, "the checkpoint", fill_disk(cluster, config, disk, "full"), undisturbed))
        finally:
            cluster.stop()
    print("\n".join(table(HEADINGS, rows)))


def _row(name: str, noticed_by: str, course: Course, undisturbed: object) -> list[str]:
    times = ["" if t is None else f"{t:.1f}" for t in (course.detected, course.resumed)]
    row = [name, noticed_by, *times, "yes" if curve(course.folder) == undisturbed else "NO"]
    print(row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    main()
