"""Fault drills: what goes wrong on a cluster is made to, and the run ends as if it had not.

    PYTHONPATH=tests:tests/distributed:tests/launch python -m drills [FAULT ...]

prints a table of the times to detection and to resumed training, of all faults or of those named.
`test_fault_drills.py` holds each of them to the run that nothing disturbs.
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
from megatron_ext.reports import table

HANG_SECONDS = 15
SLURMD_SECONDS = 36
"""Slurm asks a node each third of it: it notices a cut link 24 s later at the earliest, after the watch of ranks."""
KILL_SECONDS = 10
"""Enough for what a job does between SIGTERM and SIGKILL on a machine with little to spare."""
LOOKS_AT_LIMITS = 30
"""Seconds between two looks of Slurm at the limits of jobs, which no configuration changes."""
CHECKPOINT_EVERY = 3
MIB = 2**20
FULL_DISK = "full disk during a checkpoint"

Act = Callable[[SlurmCluster, Path], object]
"""Does something to a cluster or to a run, of which it gets the folder."""


def _nothing(cluster: SlurmCluster, folder: Path) -> None:
    """Some faults pass by themselves."""


@dataclass(frozen=True)
class Drill:
    """A fault.

    Attributes:
        name: as the table has it.
        noticed_by: as the table has it.
        cause: brings it about, in the middle of the run.
        mend: ends it, once it has been noticed.
        fields: of the run's configuration.
        sabotage: of `sabotaged.py`.
        is_outage: whether the job ends by it and starts anew.
        since: what the job notes when the time to detection begins; empty: it begins with the cause.
        goes_back: steps before the newest checkpoint from which the run goes on.
    """

    name: str
    noticed_by: str
    cause: Act
    mend: Act = _nothing
    fields: Sequence[str] = ()
    sabotage: str = ""
    is_outage: bool = True
    since: str = ""
    goes_back: int = 0


@dataclass(frozen=True)
class Course:
    """How a drill went.

    Attributes:
        folder: of the finished run.
        detected: seconds from the fault to its being noticed; None: nothing had to notice it.
        resumed: seconds from there to the first step after it, without the time that Slurm holds a job back; None: the
            run went on.
        newest: step of the newest checkpoint when the job was down; None: it was not.
        first: step that the job recorded first when it had started anew; None: it had not.
    """

    folder: Path
    detected: float | None = None
    resumed: float | None = None
    newest: int | None = None
    first: int | None = None


def kill_a_rank(cluster: SlurmCluster, folder: Path) -> None:
    """As the kernel does when memory runs out."""
    os.kill(ranks_of(folder)[-1], signal.SIGKILL)


def stop_a_rank(cluster: SlurmCluster, folder: Path) -> None:
    """It neither ends nor gets further."""
    os.kill(ranks_of(folder)[-1], signal.SIGSTOP)


def damage_newest_checkpoint(cluster: SlurmCluster, folder: Path) -> None:
    """A bit of its largest file changes."""
    checkpoints = folder / "checkpoints"
    newest = checkpoints / f"{(checkpoints / 'latest').read_text().strip()}"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def preempt(cluster: SlurmCluster, folder: Path) -> None:
    """A job of another partition wants the nodes, for three seconds."""
    where = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    cluster.run("sbatch", *where, "--wrap=sleep 3")


def _signal(name: str) -> Act:
    return lambda cluster, folder: cluster.run("scancel", "--batch", f"--signal={name}", number(folder))


def shorten(cluster: SlurmCluster, folder: Path) -> None:
    """The job's time is up in half a minute.

    Slurm looks at the limits of jobs every half minute, and warns of those that will be up before it looks again: so it
    warns first, and ends the job when it looks the next time.
    """
    cluster.run("scontrol", "update", f"JobId={number(folder)}", f"EndTime=now+{LOOKS_AT_LIMITS + 1}")


def lengthen(cluster: SlurmCluster, folder: Path) -> None:
    """Its next start has time enough."""
    cluster.run("scontrol", "update", f"JobId={number(folder)}", "TimeLimit=10")


def lengthen_next_start(cluster: SlurmCluster, folder: Path) -> None:
    """As `lengthen`, for a job whose time is up: Slurm takes no limit for it until the job has been made to wait."""
    wait_for(folder, lambda: state(cluster, folder) == "PENDING")
    lengthen(cluster, folder)


def mend_link(cluster: SlurmCluster, folder: Path) -> None:
    """The node is there again, and the job begins when Slurm lets it, two minutes after its end.

    The other drills do not wait for these. Here Slurm needs them: for more than a minute the node may tell it of the
    end of the step that ran there, and end what has the job's number. The next start's step has the same.
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
        # A checkpoint that is written beside the steps is finished by a later one, and none comes.
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
    """Two nodes, and limits that are short, but not so short that what they limit has no time."""
    limits = {"slurmd_timeout": SLURMD_SECONDS, "kill_wait": KILL_SECONDS}
    return SlurmCluster(folder, nodes=2, cpus=2, is_preempting=True, **limits)


def perform(cluster: SlurmCluster, config: Path, drill: Drill) -> Course:
    """Launch a run on two nodes, let the fault happen in its middle, and wait for its end."""
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
    drill.mend(cluster, folder)
    again, newest = _until_begun_anew(cluster, folder, inode)
    kept = len(records(folder))
    wait_for(folder, lambda: len(records(folder)) > kept)
    resumed = time.monotonic()
    finished(cluster, folder)
    return Course(folder, detected - caused, resumed - again, newest, first_steps(folder)[-1])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 32 MiB, a new folder; nodes that are started later see it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(cluster: SlurmCluster, config: Path, disk: Path, name: str, fields: Sequence[str] = ()) -> Course:
    """Launch a run on a disk that fills up in its middle, make room when its job has ended, and resume it by hand.

    Seconds to the first step are from the second `selectron launch` on.
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
    """Fill a disk with a file, but for some lines of metrics and events, if nobody takes the room in this moment."""
    with filler.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(filler.parent).free - MIB // 8)
        return True
    return False


def _is_under_way(folder: Path) -> bool:
    """Whether a run is past its eighth step and has two checkpoints, of which one may be lost.

    Steps do not wait for a checkpoint that is written beside them: where cores are busy they may be well ahead of it.
    """
    saved = CheckpointFolder(folder / "checkpoints").latest() or 0
    return len(records(folder)) >= 8 and saved >= 2 * CHECKPOINT_EVERY


def _inode(folder: Path) -> int:
    """Of a run's metrics, which each start of its job writes anew."""
    return (folder / "metrics.jsonl").stat().st_ino


def _until_begun_anew(cluster: SlurmCluster, folder: Path, inode: int) -> tuple[float, int | None]:
    """Wait until the run has other metrics than before: when Slurm let it, and the newest checkpoint until then."""
    again, newest = time.monotonic(), None

    def has_begun_anew() -> bool:
        nonlocal again, newest
        if released(cluster, folder):  # more than once, where Slurm and the job itself both want it to begin anew
            again = time.monotonic()
        before = CheckpointFolder(folder / "checkpoints").latest()
        if _inode(folder) != inode:
            return True
        newest = before  # by the start before, which may have ended with a checkpoint: there are no other metrics yet
        return False

    wait_for(folder, has_begun_anew)
    return again, newest


HEADINGS = ("fault", "noticed by", "s to detection", "s from then to training", "same curve")


def main() -> None:
    """Print the table."""
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
