"""What the batch script of a launched run has noted: RUN/launch/N/events.tsv, see slurm/train.sbatch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.files import os_reason, read_regular

EVENTS = "events.tsv"
LAUNCH = "launch"
"""Folder of a run's jobs, and of what the jobs of a sweep's runs share."""


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

    @property
    def is_start(self) -> bool:
        """Whether training was started."""
        return self.what.startswith("begun")


def launches(run_folder: Path) -> list[Path]:
    """Folders of a run's jobs, the newest last."""
    folders = [path for path in (run_folder / LAUNCH).glob("*") if path.name.isdecimal()]
    return sorted(folders, key=lambda path: int(path.name))


def read_events(launch: Path, damaged: list[str] | None = None) -> list[Event]:
    """What happened to a job, in order; a line that is being written is left out.

    Args:
        launch: folder of the job.
        damaged: gets a line for each that is none of a job's script, which is left out; None: it is raised.

    Raises:
        UserError: a line is none of a job's script, or the file cannot be read.
    """
    path, events = launch / EVENTS, []
    try:
        lines = read_regular(path).split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        lines = []
        _raise_or_note(UserError(str(path), f"cannot be read ({os_reason(error)})", "restore it or remove it"), damaged)
    for number, line in enumerate(lines, start=1):
        try:
            events.append(_event(f"{path}:{number}", line))
        except UserError as error:
            _raise_or_note(error, damaged)
    return events


def _raise_or_note(error: UserError, damaged: list[str] | None) -> None:
    if damaged is None:
        raise error
    damaged.append(f"{error.where}: {error.problem}")


def _event(where: str, line: bytes) -> Event:
    try:
        when, _, restarts, what = line.decode().split("\t", 3)
        if "\0" in when + what:
            raise ValueError("a file that was cut off by a power cut ends in zeros")
        return Event(when, int(restarts), what)
    except ValueError:
        raise UserError(where, "is not a line of a job's script", "mend the line or remove it") from None
