"""How launched runs stand: what Slurm says of their jobs, and what the runs say of themselves."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.load import read_tree
from megatron_ext.errors import UserError
from megatron_ext.events import Event, read_events
from megatron_ext.launch.job import Job, is_claimed, jobs_of, newest_job
from megatron_ext.launch.slurm import JobState, job_state
from megatron_ext.paths import path_within
from megatron_ext.reports import table

METRICS = "metrics.jsonl"
SWEEP = "sweep.json"
"""In a folder of runs: names of those that there are to be."""
COLUMNS = ("run", "job", "state", "starts", "step", "loss", "tokens/s", "last step", "last event")
FINISHED, RUNNING, WAITING = "finished", "running", "waiting"
STOPPED, FAILED, NOT_BEGUN = "stopped", "failed", "not begun"
STANDINGS = (FINISHED, RUNNING, WAITING, STOPPED, FAILED, NOT_BEGUN)
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Attributes:
        run: its name.
        folder: its folder.
        standing: one of `STANDINGS`.
        state: as Slurm says it, with the reason for waiting; else what happened last.
        job: number of its newest job, or `local`; None: there is none.
        log: what that job prints.
        starts: of that job.
        step: optimizer steps done.
        steps: that it is to do; None where it is not begun.
        loss: of the newest step, nats a token.
        tokens_per_second: of the newest step.
        seconds_ago: since the newest step.
        event: what happened last to the job.
        event_time: UTC, ISO 8601.
    """

    run: str
    folder: str
    standing: str = NOT_BEGUN
    state: str = NOT_BEGUN
    job: str | None = None
    log: str | None = None
    starts: int = 0
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_ago: float | None = None
    event: str | None = None
    event_time: str | None = None


def events_of(job: Job) -> list[Event]:
    """What happened to a job, in order."""
    return read_events(job.folder)


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
        return [path_within(folder, name, str(sweep)) for name in json.loads(sweep.read_text())["runs"]]
    return [path for path in sorted(folder.glob("*")) if jobs_of(path)]


def is_finished(folder: Path) -> bool:
    """Whether a job of a run has finished it."""
    return any(event.what == FINISHED for job in jobs_of(folder) for event in events_of(job)[-1:])


def status_of(folder: Path) -> RunStatus:
    """How a run stands.

    Raises:
        UserError: Slurm does not answer.
    """
    job = newest_job(folder)
    if job is None:
        return RunStatus(folder.name, str(folder))
    events, last = events_of(job), last_metrics(folder)
    state = None if job.number is None else job_state(job.number)  # Slurm forgets a job some minutes after its end
    return RunStatus(
        folder.name,
        str(folder),
        standing=_standing(job, events, state),
        state=_said(state, events),
        job=job.number or "local",
        log=str(job.log),
        starts=sum(event.is_start for event in events),
        step=last["step"] if last else 0,
        steps=read_tree(job.folder / "config.yaml")["training"]["steps"],
        loss=last["loss"] if last else None,
        tokens_per_second=last["tokens_per_second"] if last else None,
        seconds_ago=time.time() - (folder / METRICS).stat().st_mtime if last else None,
        event=events[-1].what if events else None,
        event_time=events[-1].time if events else None,
    )


def _standing(job: Job, events: Sequence[Event], state: JobState | None) -> str:
    last = events[-1].what if events else ""
    if last == FINISHED:
        return FINISHED
    if state is not None and state.is_alive:
        return RUNNING if state.state in {"RUNNING", "COMPLETING"} else WAITING
    if job.number is None and is_claimed(job.run):
        return RUNNING
    if last in {"stopped", ""} or (state is not None and state.state == "CANCELLED"):
        return STOPPED
    return FAILED


def _said(state: JobState | None, events: Sequence[Event]) -> str:
    if state is None:
        return events[-1].what.split(":")[0] if events else "ended before it began"
    return f"{state.state.lower()} ({state.reason})" if state.reason else state.state.lower()


def status_table(runs: Sequence[RunStatus]) -> list[str]:
    """A line for each run, and for several how many stand how; a line more for each that failed."""
    lines = table(COLUMNS, [_row(run) for run in runs])
    if len(runs) > 1:
        lines += ["", _summary(runs)]
    failed = [run for run in runs if run.standing == FAILED]
    return lines + [f"{run.run} failed: {run.event or run.state}; see {run.log}" for run in failed]


def _row(run: RunStatus) -> list[str]:
    return [
        run.run,
        run.job or "",
        run.state,
        str(run.starts) if run.job else "",
        f"{run.step} of {run.steps}" if run.job else "",
        f"{run.loss:.4f}" if run.loss is not None else "",
        f"{run.tokens_per_second:,.0f}" if run.tokens_per_second is not None else "",
        f"{ago(run.seconds_ago)} ago" if run.seconds_ago is not None else "",
        f"{run.event_time} {run.event}" if run.event else "",
    ]


def _summary(runs: Sequence[RunStatus]) -> str:
    counts = Counter(run.standing for run in runs)
    return f"{len(runs)} runs: " + ", ".join(f"{counts[kind]} {kind}" for kind in STANDINGS if counts[kind])


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


def ago(seconds: float) -> str:
    """A time as a person says it: 90 s, 3 min, 5 h, 2 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
