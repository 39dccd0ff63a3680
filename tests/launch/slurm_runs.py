"""Runs that are launched on a cluster of virtual nodes: how a test starts and watches them, and waits for their end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launching import records
from slurm_cluster import SlurmCluster
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron_ext.launch.job import jobs_of
from megatron_ext.launch.status import events_of

STEPS = 60
FIELDS = [f"training.steps={STEPS}", "training.evaluate_every=0", "training.micro_batch_size=1"]
CLI = (sys.executable, "-m", "megatron_ext.cli")
LAUNCH = (*CLI, "launch", "--no-preflight")


def launched(
    cluster: SlurmCluster,
    config: Path,
    name: str,
    fields: Sequence[str] = (),
    *,
    nodes: int = 2,
    processes_per_node: int = 2,
    options: Sequence[str] = ("--time", "10"),
    runs: Path | None = None,
) -> Path:
    """Launch a run, as a user does; its folder, in `runs` beside the configuration or elsewhere."""
    where = ["--nodes", str(nodes), "--processes-per-node", str(processes_per_node), *options]
    printed = cluster.run(*LAUNCH, str(config), *FIELDS, *fields, f"run.name={name}", *where)
    folder = (runs or config.parent / "runs") / name
    (job,) = jobs_of(folder)
    assert f"job:    {job.number}\n" in printed
    assert f"log:    {job.log}\n" in printed
    return folder


def happened(folder: Path) -> list[str]:
    return [event.what for event in events_of(jobs_of(folder)[-1])]


def number(folder: Path) -> str:
    """Of a run's newest job."""
    return str(jobs_of(folder)[-1].number)


def state(cluster: SlurmCluster, folder: Path) -> str:
    """Of a run's newest job, as Slurm has it."""
    said = cluster.run("squeue", "--noheader", "--states=all", f"--jobs={number(folder)}", "--format=%T", check=False)
    return said.strip()


def wait_for(folder: Path, condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        log = jobs_of(folder)[-1].log
        assert time.monotonic() < end, (happened(folder), log.read_text() if log.exists() else "no log")
        time.sleep(0.05)


def released(cluster: SlurmCluster, folder: Path) -> bool:
    """As `release`, for a run's newest job."""
    return release(cluster, number(folder))


def release(cluster: SlurmCluster, job: str) -> bool:
    """Let a job begin in three seconds, and wait for them, if Slurm holds it; whether it did.

    A job that starts anew is held for two minutes by Slurm, and must be for some time: a node takes a job begun in the
    second in which it was requeued for the one that it has just ended.
    """
    held = cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%T %r", check=False)
    if held.strip() != "PENDING BeginTime":
        return False
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3", check=False)  # it may begin in this moment
    time.sleep(3)
    return True


def finished(cluster: SlurmCluster, folder: Path) -> Path:
    """Wait for the end of a run, whose job Slurm may hold."""

    def is_finished() -> bool:
        released(cluster, folder)
        time.sleep(0.2)
        return happened(folder)[-1:] == ["finished"]

    wait_for(folder, is_finished)
    return folder


def wait_for_step(folder: Path, step: int) -> None:
    wait_for(folder, lambda: len(records(folder)) >= step)


def first_steps(folder: Path) -> list[int]:
    """The step that each start of a run recorded first, of those that recorded one.

    From TensorBoard's files: each start writes its own, where metrics.jsonl is one for all.
    """
    firsts = []
    for file in sorted((folder / "tensorboard").iterdir()):  # their names begin with the time
        events = EventFileLoader(str(file)).Load()
        firsts += [event.step for event in events if event.HasField("summary")][:1]
    return firsts


def ranks_of(folder: Path) -> list[int]:
    """Processes of a run's ranks, whatever node they are on."""
    found = subprocess.run(["pgrep", "-f", f"cli train {folder}/launch"], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in found.stdout.split()]
    return [pid for pid in pids if os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")]
