"""Helpers that launch runs on a cluster of virtual nodes, watch them, and wait for their end."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

from slurm_cluster import SlurmCluster
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron_ext.cli import main
from megatron_ext.launch import slurm
from megatron_ext.launch.job import list_jobs
from megatron_ext.launch.status import read_job_events

STEPS = 24
RELEASE_SECONDS = 2
POLL_SECONDS = 0.5
"""Pause between two queries of Slurm. Each starts several processes on the cores that the ranks use, too."""
FIELDS = [f"training.steps={STEPS}", "training.evaluate_every=0", "training.micro_batch_size=1"]
CLI = (sys.executable, "-m", "megatron_ext.cli")
LAUNCH = ("launch", "--no-preflight")


def call(cluster: SlurmCluster, *arguments: str) -> str:
    """Run a command of Selectron in this process, with Slurm's commands on the cluster. Return its standard output.

    Raises:
        RuntimeError: the command fails.
    """
    out, errors = io.StringIO(), io.StringIO()
    asked = patch.object(slurm, "_run_process", lambda command: cluster.call(*command))
    with asked, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(arguments)
    if code:
        raise RuntimeError(f"{arguments} ended with {code}: {errors.getvalue()}")
    return out.getvalue()


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
    """Launch a run. Return its folder, in `runs` beside the configuration by default."""
    where = ["--nodes", str(nodes), "--processes-per-node", str(processes_per_node), *options]
    printed = call(cluster, *LAUNCH, str(config), *FIELDS, *fields, f"run.name={name}", *where)
    folder = (runs or config.parent / "runs") / name
    (job,) = list_jobs(folder)
    assert f"job:    {job.number}\n" in printed
    assert f"log:    {job.log}\n" in printed
    return folder


def job_events(folder: Path) -> list[str]:
    return [event.description for event in read_job_events(list_jobs(folder)[-1])]


def number(folder: Path) -> str:
    """Job id of a run's newest job."""
    return str(list_jobs(folder)[-1].number)


def state(cluster: SlurmCluster, folder: Path) -> str:
    """Slurm state of a run's newest job."""
    output = cluster.run("squeue", "--noheader", "--states=all", f"--jobs={number(folder)}", "--format=%T", check=False)
    return output.strip()


def wait_for(folder: Path, condition: Callable[[], object], seconds: float = 300, pause: float = 0.05) -> None:
    """Wait for a condition on a run. Pass `POLL_SECONDS` as the pause if the condition queries Slurm."""
    end = time.monotonic() + seconds
    while not condition():
        log = list_jobs(folder)[-1].log
        assert time.monotonic() < end, (job_events(folder), log.read_text() if log.exists() else "no log")
        time.sleep(pause)


def released(cluster: SlurmCluster, folder: Path) -> bool:
    """Call `release` for a run's newest job."""
    return release(cluster, number(folder))


def release(cluster: SlurmCluster, job: str) -> bool:
    """If Slurm holds a job, set its start time to two seconds from now, wait, and return True.

    Slurm holds a requeued job for two minutes. Some delay is necessary: if the job starts within the second of its
    requeue, a node mistakes it for the job that just ended.
    """
    held = cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%T %r %S", check=False).split()
    if held[:2] != ["PENDING", "BeginTime"] or not is_far(held[2]):
        return False
    cluster.run("scontrol", "update", f"JobId={job}", f"StartTime=now+{RELEASE_SECONDS}", check=False)
    time.sleep(RELEASE_SECONDS)
    return True


def is_far(start: str) -> bool:
    """Return True if a start time is later than that of a released job, which Slurm may start a little late."""
    return start == "N/A" or datetime.fromisoformat(start).timestamp() > time.time() + RELEASE_SECONDS


def finished(cluster: SlurmCluster, folder: Path) -> Path:
    """Wait until a run is finished, releasing its job if Slurm holds it. Return its folder."""

    def is_finished() -> bool:
        if job_events(folder)[-1:] == ["finished"]:
            return True
        released(cluster, folder)
        return False

    wait_for(folder, is_finished, pause=POLL_SECONDS)
    return folder


def first_steps(folder: Path) -> list[int]:
    """First recorded step of each start of a run that recorded any.

    The steps come from TensorBoard's files: each start writes its own, while metrics.jsonl is shared.
    """
    firsts = []
    for file in sorted((folder / "tensorboard").iterdir()):  # their names begin with the time
        events = EventFileLoader(str(file)).Load()
        firsts += [event.step for event in events if event.HasField("summary")][:1]
    return firsts
