"""How launched runs stand: what Slurm says of their jobs, and what the runs say of themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.load import read_tree
from megatron_ext.errors import UserError
from megatron_ext.launch.job import EVENTS, Job, jobs_of
from megatron_ext.launch.slurm import job_state
from megatron_ext.reports import table

METRICS = "metrics.jsonl"
SWEEP = "sweep.json"
"""In a folder of runs: names of those that there are to be."""
COLUMNS = ("run", "job", "state", "starts", "step", "loss", "tokens/s", "last step", "last event")
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Event:
    """A line that a job's script wrote.

    Attributes:
        time: UTC, ISO 8601.
        restarts: of the job until then.
        what: happened.
    """

    time: str
    restarts: int
    what: str


def events_of(job: Job) -> list[Event]:
    """What happened to a job, in order; a line that is being written is left out."""
    path = job.folder / EVENTS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Event(when, int(restarts), what) for when, _, restarts, what in (line.split("\t", 3) for line in lines)]


def run_folders(given: Sequence[Path]) -> Iterator[Path]:
    """The launched runs among folders, or in them.

    Raises:
        UserError: a folder is none, or holds none.
    """
    for folder in given:
        inside = [folder] if jobs_of(folder) else _inside(folder)
        if not inside:
            problem = "holds no run that was launched" if folder.is_dir() else "is no folder"
            raise UserError(str(folder), problem, "give run.dir/run.name of a launched run, or run.dir")
        yield from inside


def _inside(folder: Path) -> list[Path]:
    sweep = folder / SWEEP
    if sweep.exists():
        return [folder / name for name in json.loads(sweep.read_text())["runs"]]
    return [path for path in sorted(folder.glob("*")) if jobs_of(path)]


def is_finished(folder: Path) -> bool:
    """Whether a job of a run has finished it."""
    return any(event.what == "finished" for job in jobs_of(folder) for event in events_of(job)[-1:])


def status_table(folders: Sequence[Path]) -> list[str]:
    """A line for each run.

    Raises:
        UserError: Slurm does not answer.
    """
    return table(COLUMNS, [_row(folder) for folder in folders])


def _row(folder: Path) -> list[str]:
    if not jobs_of(folder):
        return [folder.name, "", "not begun", *[""] * (len(COLUMNS) - 3)]
    job = jobs_of(folder)[-1]
    events, last = events_of(job), last_metrics(folder)
    steps = read_tree(job.folder / "config.yaml")["training"]["steps"]
    starts = sum(event.what.startswith("begun") for event in events)
    return [
        folder.name,
        job.number or "local",
        _state(job, events),
        str(starts),
        f"{last['step'] if last else 0} of {steps}",
        f"{last['loss']:.4f}" if last else "",
        f"{last['tokens_per_second']:,.0f}" if last else "",
        f"{_ago(time.time() - (folder / METRICS).stat().st_mtime)} ago" if last else "",
        f"{events[-1].time} {events[-1].what}" if events else "",
    ]


def _state(job: Job, events: Sequence[Event]) -> str:
    state = None if job.number is None else job_state(job.number)
    if state is None:  # Slurm forgets a job some minutes after its end
        return events[-1].what.split(":")[0] if events else "not begun"
    return f"{state.state.lower()} ({state.reason})" if state.reason else state.state.lower()


def last_metrics(folder: Path) -> dict[str, Any] | None:
    """The newest whole record of a run; None: there is none yet."""
    path = folder / METRICS
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    last: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return last


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
