"""Events that the batch script of a launched run records in RUN/launch/N/events.tsv; see launch/train.sbatch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.utils.atomic_files import os_error_reason, read_regular
from megatron_ext.utils.errors import UserError

EVENTS = "events.tsv"
LAUNCH = "launch"
"""Name of the folder with a run's jobs, and of the folder that the jobs of a sweep's runs share."""


@dataclass(frozen=True)
class Event:
    """Event recorded by a job's script.

    Attributes:
        time: UTC, ISO 8601.
        restarts: number of restarts of the job so far.
        description: description of the event.
    """

    time: str
    restarts: int
    description: str

    @property
    def is_start(self) -> bool:
        """True if training started."""
        return self.description.startswith("begun")


def launch_folders(run_folder: Path) -> list[Path]:
    """Return the folders of a run's jobs, the newest last."""
    folders = [path for path in (run_folder / LAUNCH).glob("*") if path.name.isdecimal()]
    return sorted(folders, key=lambda path: int(path.name))


def read_events(launch: Path, damaged: list[str] | None = None) -> list[Event]:
    """Read the events of a job in order, without an incomplete last line.

    Args:
        launch: folder of the job.
        damaged: receives a message for each invalid line, which is then skipped; None: raise an error instead.

    Raises:
        UserError: a line is invalid or the file cannot be read, and `damaged` is None.
    """
    path, events = launch / EVENTS, []
    try:
        lines = read_regular(path).split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        lines = []
        _raise_or_append(
            UserError(str(path), f"cannot be read ({os_error_reason(error)})", "restore it or remove it"), damaged
        )
    for number, line in enumerate(lines, start=1):
        try:
            events.append(_parse_event(f"{path}:{number}", line))
        except UserError as error:
            _raise_or_append(error, damaged)
    return events


def _raise_or_append(error: UserError, damaged: list[str] | None) -> None:
    if damaged is None:
        raise error
    damaged.append(f"{error.where}: {error.problem}")


def _parse_event(where: str, line: bytes) -> Event:
    try:
        time, _, restarts, description = line.decode().split("\t", 3)
        if "\0" in time + description:
            raise ValueError("a file that was truncated by a power failure ends in zeros")
        return Event(time, int(restarts), description)
    except ValueError:
        raise UserError(where, "is not an event of a job's script", "fix or remove the line") from None
