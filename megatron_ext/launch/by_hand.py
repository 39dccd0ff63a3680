"""Runs that `selectron train` was called for by hand, which have no job: what their lock and records say of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.heartbeat import FOLDER as HEARTBEATS
from megatron_ext.run_folder.lock import FOLDER as LOCK
from megatron_ext.run_folder.lock_file import Holder, LockState, lock_state

BY_HAND = "by hand"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class ManualStart:
    """A start of a run by `selectron train` itself, not by a launched job.

    Attributes:
        is_running: whether its process trains.
        is_stopped: whether it ended in order: finished, or stopped with a checkpoint.
        said: in words.
        output: file that it prints to; empty: a terminal or a pipe, which keeps nothing, or it is not known.
    """

    is_running: bool
    is_stopped: bool
    said: str
    output: str = ""


def has_begun(run: Path) -> bool:
    """Whether a process has trained a run, launched or not."""
    return any((run / name).exists() for name in (METRICS, HEARTBEATS, LOCK))


def manual_start(run: Path, last_event: str | None) -> ManualStart | None:
    """The newest start of a run, if a user called `selectron train` for it; None: a launched job made it, or none is.

    Args:
        run: folder of the run.
        last_event: time of the last event of its newest job, UTC, ISO 8601; None: there is no such job.
    """
    state = lock_state(run / LOCK)
    holder = None if state is None else state.holder
    if state is None or holder is None:
        return ManualStart(False, True, "no process is known") if last_event is None and has_begun(run) else None
    if last_event is not None and (holder.launch or holder.since <= last_event):
        return None  # the job's own
    return ManualStart(state.is_held, holder.released, _said(state, holder), holder.output)


def _said(state: LockState, holder: Holder) -> str:
    if state.is_held:
        return f"running ({holder.process})"
    return "ended" if holder.released else f"gone ({holder.process})"
