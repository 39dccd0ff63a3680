"""Status of launched runs, from Slurm's job states and the runs' own files."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.load import read_tree
from megatron_ext.launch.by_hand import BY_HAND, ManualStart, has_started, manual_start
from megatron_ext.launch.job import NUMBER, Job, is_locally_locked, list_jobs, newest_job
from megatron_ext.launch.ownership import belongs_to_other_folder
from megatron_ext.launch.readings import FileReader
from megatron_ext.launch.slurm import JobState, job_state
from megatron_ext.run_folder.launch_events import LAUNCH, Event, read_events
from megatron_ext.run_folder.layout import CONFIG, METRICS, SWEEP
from megatron_ext.utils.atomic_files import open_regular, read_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.markdown import table
from megatron_ext.utils.printable import printable
from megatron_ext.utils.untrusted_paths import path_within

COLUMNS = ("run", "job", "state", "starts", "step", "loss", "tokens/s", "last step", "last event")
FINISHED, RUNNING, WAITING = "finished", "running", "waiting"
STOPPED, FAILED, NOT_STARTED = "stopped", "failed", "not begun"
DAMAGED = "damaged"
COPIED = "copied"
"""State of a run whose newest job belongs to another folder."""
STANDINGS = (FINISHED, RUNNING, WAITING, STOPPED, FAILED, DAMAGED, NOT_STARTED)
_MAX_PROBLEMS = 3
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class RunStatus:
    """Status of a run.

    Attributes:
        run: name of the run.
        folder: run folder.
        standing: one of `STANDINGS`.
        state: Slurm's state with the reason for waiting, else the last event.
        job: number of the run's newest job, `local`, or `by hand` if `selectron train` was called since; None without a
            job.
        log: file with the output of the newest job, or None.
        starts: number of starts of the newest job.
        step: number of completed optimizer steps.
        steps: number of planned optimizer steps; None if unknown.
        loss: loss of the newest step, in nats per token.
        tokens_per_second: throughput in the newest step.
        seconds_ago: age of the newest step in seconds.
        event: last event of the job.
        event_time: time of the last event in UTC, ISO 8601.
        problems: a line for each damaged file, and a line if the folder is a copy of another run's folder.
    """

    run: str
    folder: str
    standing: str = NOT_STARTED
    state: str = NOT_STARTED
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
    problems: tuple[str, ...] = ()


def read_job_events(job: Job) -> list[Event]:
    """Return the events of a job, in order."""
    return read_events(job.folder)


def run_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of launched or manually started runs among `paths` and inside the folders of `paths`.

    Raises:
        UserError: a folder does not exist or contains no run.
    """
    for folder in paths:
        folders = [folder] if list_jobs(folder) or has_started(folder) else _find_runs(folder)
        if not folders:
            problem = "contains no run that has started" if folder.is_dir() else "is not a folder"
            raise UserError(str(folder), problem, "give a run folder, run.dir/run.name, or run.dir")
        yield from folders


def _find_runs(folder: Path) -> list[Path]:
    sweep, reader = folder / SWEEP, FileReader()
    no_names: list[str] = []
    names = (
        reader.get(sweep, lambda: list(parse_json(read_regular(sweep))["runs"]), no_names)
        if os.path.lexists(sweep)
        else no_names
    )
    for problem in reader.problems:
        print(f"selectron: warning: {problem}; using the existing run folders instead", file=sys.stderr)
    swept = [path_within(folder, name, str(sweep)) for name in names]
    return swept or [path for path in sorted(folder.glob("*")) if list_jobs(path) or has_started(path)]


def is_finished(folder: Path) -> bool:
    """Return True if a job of the run has finished it."""
    return any(event.description == FINISHED for job in list_jobs(folder) for event in read_job_events(job)[-1:])


def status_of(folder: Path) -> RunStatus:
    """Return the status of a run. Files that cannot be read are listed in its problems.

    Raises:
        UserError: Slurm does not respond.
    """
    reader = FileReader()
    job = reader.get(folder, lambda: newest_job(folder), None)
    if job is None and (manual := manual_start(folder, None)) is not None:
        return _manual_status(folder, manual, reader)
    if job is None:
        standing = DAMAGED if reader.problems else NOT_STARTED
        return RunStatus(folder.name, str(folder), standing, standing, problems=tuple(reader.problems))
    number, events = reader.get(job.folder, lambda: job.number, None), read_events(job.folder, reader.problems)
    is_damaged = bool(reader.problems)
    state = None if number is None else job_state(number)  # Slurm forgets a job some minutes after its end
    is_copy = state is not None and belongs_to_other_folder(job, state)
    if state is not None and is_copy:
        problem = f"{job.folder / NUMBER}: job {number} belongs to {printable(str(state.script))}"
        reader.problems.append(f"{problem}: this folder was copied or moved")
        state = None
    manual = manual_start(folder, events[-1].time if events else "")
    if manual is not None and (state is None or not state.is_alive):  # started by hand after the job
        return _manual_status(folder, manual, reader)
    last = last_metrics(folder, reader)
    standing = _standing(job, number, events, state, reader)
    if is_damaged and standing != FINISHED and (state is None or not state.is_alive):
        standing = DAMAGED
    if is_copy and standing == FAILED:  # the copied events end where the original continued
        standing = STOPPED
    config = job.folder / CONFIG
    return RunStatus(
        folder.name,
        str(folder),
        standing=standing,
        state=DAMAGED if standing == DAMAGED else COPIED if is_copy else _describe_state(state, events),
        job=number or ("?" if (job.folder / NUMBER).exists() else "local"),
        log=str(job.folder / f"job-{number or 'local'}.log"),
        starts=sum(event.is_start for event in events),
        step=last["step"] if last else 0,
        steps=reader.get(config, lambda: _read_steps(config), None),
        loss=last["loss"] if last else None,
        tokens_per_second=last["tokens_per_second"] if last else None,
        seconds_ago=time.time() - (folder / METRICS).stat().st_mtime if last else None,
        event=events[-1].description if events else None,
        event_time=events[-1].time if events else None,
        problems=tuple(reader.problems),
    )


def _manual_status(folder: Path, manual: ManualStart, reader: FileReader) -> RunStatus:
    """Return the status of a run whose newest start was by `selectron train`."""
    last, config = last_metrics(folder, reader), folder / CONFIG
    steps = reader.get(config, lambda: _read_steps(config), None) if config.exists() else None
    step = last["step"] if last else 0
    standing, state = STOPPED if manual.is_stopped else FAILED, manual.description
    if manual.is_running:
        standing = RUNNING
    elif steps is not None and step >= steps:
        standing = state = FINISHED
    elif manual.is_stopped:
        state = STOPPED
    return RunStatus(
        folder.name,
        str(folder),
        standing=standing,
        state=state,
        job=BY_HAND,
        log=manual.output or None,
        step=step,
        steps=steps,
        loss=last["loss"] if last else None,
        tokens_per_second=last["tokens_per_second"] if last else None,
        seconds_ago=time.time() - (folder / METRICS).stat().st_mtime if last else None,
        problems=tuple(reader.problems),
    )


def _read_steps(config: Path) -> int:
    os.close(open_regular(config))
    steps = read_tree(config)["training"]["steps"]
    if type(steps) is not int:
        raise ValueError(f"training.steps is {str(steps)[:40]!r}")
    return steps


def _standing(job: Job, number: str | None, events: Sequence[Event], state: JobState | None, reader: FileReader) -> str:
    last = events[-1].description if events else ""
    if last == FINISHED:
        return FINISHED
    if state is not None and state.is_alive:
        return RUNNING if state.state in {"RUNNING", "COMPLETING"} else WAITING
    if number is None and reader.get(job.run / LAUNCH / "lock", lambda: is_locally_locked(job.run), False):
        return RUNNING
    if last in {"stopped", ""} or (state is not None and state.state == "CANCELLED"):
        return STOPPED
    return FAILED


def _describe_state(state: JobState | None, events: Sequence[Event]) -> str:
    if state is None:
        return events[-1].description.split(":")[0] if events else "ended before it started"
    return f"{state.state.lower()} ({state.reason})" if state.reason else state.state.lower()


def status_table(runs: Sequence[RunStatus]) -> list[str]:
    """Return a line per run, a summary if there are several, and a line per failure and problem."""
    lines = table(COLUMNS, [_row(run) for run in runs])
    if len(runs) > 1:
        lines += ["", _summary(runs)]
    failed = [run for run in runs if run.standing == FAILED]
    lines += [printable(f"{run.run} failed: {run.event or run.state}{_log_hint(run)}") for run in failed]
    for run in runs:
        lines += [f"{run.run}: {printable(problem)}" for problem in run.problems[:_MAX_PROBLEMS]]
        if len(run.problems) > _MAX_PROBLEMS:
            lines.append(f"{run.run}: {len(run.problems) - _MAX_PROBLEMS} more damaged lines or files")
    return lines


def _log_hint(run: RunStatus) -> str:
    return f"; see {run.log}" if run.log else "; its output was not saved"


def _row(run: RunStatus) -> list[str]:
    return [
        printable(run.run),
        run.job or "",
        printable(run.state),
        str(run.starts) if run.starts else "",
        f"{run.step} of {'?' if run.steps is None else run.steps}" if run.job else "",
        f"{run.loss:.4f}" if run.loss is not None else "",
        f"{run.tokens_per_second:,.0f}" if run.tokens_per_second is not None else "",
        f"{format_age(run.seconds_ago)} ago" if run.seconds_ago is not None else "",
        printable(f"{run.event_time} {run.event}") if run.event else "",
    ]


def _summary(runs: Sequence[RunStatus]) -> str:
    counts = Counter(run.standing for run in runs)
    return f"{len(runs)} runs: " + ", ".join(f"{counts[kind]} {kind}" for kind in STANDINGS if counts[kind])


def last_metrics(folder: Path, reader: FileReader | None = None) -> dict[str, Any] | None:
    """Return the newest complete metrics record of a run, or None.

    Args:
        folder: run folder.
        reader: collects problems with damaged lines; None to ignore them.
    """
    path, reader = folder / METRICS, reader or FileReader()
    no_lines: list[bytes] = []
    lines = reader.get(path, lambda: _last_lines(path), no_lines) if os.path.lexists(path) else no_lines
    found = None
    for line in reversed(lines):
        found = reader.get(path, lambda line=line: _parse_record(line), None)  # type: ignore[misc]
        if found is not None:
            break
    return found


def _last_lines(path: Path) -> list[bytes]:
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        whole = file.read().split(b"\n")[:-1]
    return whole[1:] if size > _TAIL_BYTES else whole  # the first line may be incomplete


def _parse_record(line: bytes) -> dict[str, Any]:
    record = parse_json(line)
    found = {name: record[name] for name in ("step", "loss", "tokens_per_second")}
    if type(found["step"]) is not int or any(type(found[name]) not in (int, float) for name in found):
        raise ValueError("a value is not a number")
    return {name: number if math.isfinite(number) else None for name, number in found.items()}


def format_age(seconds: float) -> str:
    """Format a duration for display: 90 s, 3 min, 5 h, 2 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
