"""Base class of loggers that send values to a tracking service."""

from __future__ import annotations

import json
import queue
import sys
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from tqdm import tqdm

from megatron_ext.run_folder.layout import tracker_file_name
from megatron_ext.training.loggers.core.base import LoggedRun, Logger, Start, scalars
from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.credentials import redact
from megatron_ext.utils.printable import printable

CLOSE_SECONDS, STOP_SECONDS = 120.0, 15.0
"""Maximum seconds to wait for a service to receive the last values when a run is finished, and when it is stopped. The
second limit is short because Slurm kills a job soon after asking it to stop."""

PROJECT = "selectron"
"""Project or experiment at a service, unless the service's own environment variable names another."""


@dataclass(frozen=True)
class Point:
    """Values of a step by tag."""

    step: int
    metrics: Mapping[str, float]


@checked_dataclass(frozen=True, config=ConfigDict(extra="ignore", strict=True))
class TrackedRun:
    """Run at a service, as recorded in the run folder.

    Attributes:
        run: identifier of the run at the service.
        records: number of records that were sent to the service.
    """

    run: str
    records: int


class Tracker(Logger):
    """Logger that sends values to a tracking service from its own thread, so that training never waits for a network.

    The services cannot remove logged steps. A resumed run therefore continues its run at the service only if the
    service has exactly the records in the run folder. Otherwise (the process was killed after its last checkpoint, the
    run rolled back, or the service had failed), a new run at the service begins with all records so far.

    An error of the service is printed once, and nothing more is sent until the next start.
    """

    service: str
    """Name in `logging.backends`."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._jobs: queue.SimpleQueue[tuple[bool, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._records = self._last_step = 0
        self._id: str | None = None
        self._failed = self._warned = False

    @abstractmethod
    def begin(self, run_id: str | None) -> str:
        """Open a run at the service.

        Args:
            run_id: identifier of the run to continue; None to create a run.

        Returns:
            Identifier of the run at the service.
        """

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Send values in the order of their steps, which may repeat."""

    @abstractmethod
    def finish(self, *, finished: bool) -> None:
        """Send what is buffered and close the run. `finished` is True if the run has reached its last step."""

    def start(self, start: Start) -> None:
        """Begin or continue a run at the service. See the class."""
        if self._thread is None:
            tracked = self._read_tracked_run()
            # A process that is killed leaves no file: what the service has received is then unknown.
            (self.run.folder / tracker_file_name(self.service)).unlink(missing_ok=True)
            is_continuable = tracked is not None and tracked.records == start.records and not start.has_dropped
            run_id = tracked.run if tracked is not None and is_continuable else None
            self._thread = threading.Thread(target=self._process_jobs, name=f"{self.service} logger", daemon=True)
            self._thread.start()
        elif start.has_dropped:
            run_id = None
        else:  # rolled back without repeating a recorded step
            return
        earlier_points = (
            [] if run_id else [Point(int(record["step"]), scalars(name, record)) for name, record in start.history()]
        )
        earlier_points.sort(key=lambda point: point.step)
        self._records = start.records
        self._last_step = start.step
        self._jobs.put((True, lambda: self._begin(run_id, earlier_points)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the values for the thread."""
        self._records += 1
        self._last_step = step
        self._jobs.put((False, lambda: self.send([Point(step, dict(metrics))])))

    def close(self) -> None:
        """Wait until the service has received all values, and note its run in the run folder."""
        if self._thread is None:
            return
        finished = self._last_step >= self.run.steps
        self._jobs.put((False, lambda: self.finish(finished=finished)))
        self._jobs.put(None)
        timeout = CLOSE_SECONDS if finished else STOP_SECONDS
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn(f"did not receive the last values within {timeout:.0f} s")
        elif not self._failed and self._id is not None:
            tracked = json.dumps(asdict(TrackedRun(self._id, self._records)))
            write_atomically(self.run.folder / tracker_file_name(self.service), (tracked + "\n").encode())

    def _read_tracked_run(self) -> TrackedRun | None:
        """Return the run at the service that the run folder records; None without a record, or if it is damaged."""
        path = self.run.folder / tracker_file_name(self.service)
        try:
            found: TrackedRun = TypeAdapter(TrackedRun).validate_json(read_regular(path))
        except (FileNotFoundError, ValidationError):
            return None
        return found

    def _begin(self, run_id: str | None, earlier_points: Sequence[Point]) -> None:
        if self._id is not None and not self._failed:
            self.finish(finished=False)
        self._id, self._failed = None, False
        self._id = self.begin(run_id)
        if earlier_points:
            self.send(earlier_points)

    def _process_jobs(self) -> None:
        """Do queued jobs until None. After an error only a job that begins a run is tried."""
        while (queued := self._jobs.get()) is not None:
            is_begin, job = queued
            if self._failed and not is_begin:
                continue
            try:
                job()
            except Exception as error:  # no error of a service may stop training
                self._failed = True
                self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, problem: str) -> None:
        """Print the first problem in one line."""
        if self._warned:
            return
        self._warned = True
        text = printable(redact(" ".join(problem.split())[:200].rstrip(".")))
        line = f"selectron: warning: {self.service}: {text}; training continues, and the next start sends all steps"
        tqdm.write(line, file=sys.stderr)


def new_id() -> str:
    """Return a random identifier of 8 hexadecimal digits."""
    return uuid.uuid4().hex[:8]
