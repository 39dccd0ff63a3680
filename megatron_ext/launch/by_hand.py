"""State of runs started directly with `selectron train`, without a job, from their lock and records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.launch.job import Job
from megatron_ext.run_folder.heartbeat import FOLDER as HEARTBEATS
from megatron_ext.run_folder.launch_events import read_events
from megatron_ext.run_folder.layout import METRICS
from megatron_ext.run_folder.lock import FOLDER as LOCK
from megatron_ext.run_folder.lock_file import Holder, LockState, lock_state

BY_HAND = "by hand"


@dataclass(frozen=True)
class ManualStart:
    """Start of a run by `selectron train` itself rather than by a launched job.

    Attributes:
        is_running: True if its process is training.
        is_stopped: True if its process exited properly: finished, or stopped with a checkpoint.
        description: description of the state for users.
        output: file with the output of its process; empty if that is a terminal, a pipe or unknown.
    """

    is_running: bool
    is_stopped: bool
    description: str
    output: str = ""


def has_started(run: Path) -> bool:
    """Return True if a process has trained the run, launched or not."""
    return any((run / name).exists() for name in (METRICS, HEARTBEATS, LOCK))


def newest_manual_start(run: Path, job: Job | None) -> ManualStart | None:
    """Return the newest start of a run by hand if it is later than the last event of the newest job, else None."""
    events = [] if job is None else read_events(job.folder, [])
    return manual_start(run, None if job is None else events[-1].time if events else "")


def manual_start(run: Path, last_event: str | None) -> ManualStart | None:
    """Return the newest start of a run if it was by hand; None if it was by a launched job, or if there is no start.

    Args:
        run: run folder.
        last_event: time of the last event of the run's newest job in UTC, ISO 8601; empty if the job has no events;
            None if there is no job.
    """
    state = lock_state(run / LOCK)
    holder = None if state is None else state.holder
    if state is None or holder is None:
        return ManualStart(False, True, "no process is known") if last_event is None and has_started(run) else None
    if last_event is not None and (holder.launch or holder.since <= last_event):
        return None  # started by the job
    return ManualStart(state.is_held, holder.released, _describe_state(state, holder), holder.output)


def _describe_state(state: LockState, holder: Holder) -> str:
    if state.is_held:
        return f"running ({holder.process})"
    return "ended" if holder.released else f"gone ({holder.process})"
