"""What the batch script of a launched run has noted: RUN/launch/N/events.tsv, see slurm/train.sbatch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError

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


def read_events(launch: Path) -> list[Event]:
    """What happened to a job, in order; a line that is being written is left out.

    Args:
        launch: folder of the job.

    Raises:
        UserError: a line is none of a job's script.
    """
    path = launch / EVENTS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [_event(f"{path}:{number}", line) for number, line in enumerate(lines, start=1)]


def _event(where: str, line: str) -> Event:
    when, *rest = line.split("\t", 3)
    if len(rest) != 3 or not rest[1].isdecimal():
        raise UserError(where, "is not a line of a job's script", "mend the line or remove it")
    return Event(when, int(rest[1]), rest[2])
