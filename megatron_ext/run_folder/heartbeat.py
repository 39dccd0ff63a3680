"""Heartbeats: a small file per rank, which a thread of the rank rewrites every few seconds.

Heartbeats identify the rank that blocks all others. Such a rank has made fewer passes than the others, or it has
stopped writing because its process or machine has failed or was stopped.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from megatron_ext.utils.atomic_files import open_to_write, os_error_reason, read_regular
from megatron_ext.utils.json_text import parse_json

FOLDER = "heartbeats"
_MAX_ABSOLUTE_VALUE = 1 << 53
"""Upper bound of the absolute values in a heartbeat. Larger integers may not fit a float."""

_FILE_BYTES = 320
"""Size of a heartbeat file in bytes. The size is fixed and the file is overwritten in one call.

A reader therefore sees either the old or the new content.
"""


@dataclass(frozen=True)
class HeartbeatRecord:
    """Heartbeat of a rank. Times are in seconds since 1970, by the clock of its machine.

    Attributes:
        rank: rank number.
        host: host name.
        pid: process id on the host.
        seconds: interval between heartbeats.
        step: number of completed steps.
        passes: number of forward passes and other synchronous operations since the rank's start.
        further: time at which `passes` last increased.
        written: time of this heartbeat.
        ended: True if this is the rank's last heartbeat.
        start: token of the run's lock during this start of the run; empty if written by an older version.
    """

    rank: int
    host: str
    pid: int
    seconds: float
    step: int
    passes: int
    further: float
    written: float
    ended: bool
    start: str = ""


class Heartbeat:
    """Writer of one rank's heartbeats, until it is closed.

    Args:
        folder: run folder.
        rank: rank of this process.
        seconds: interval between heartbeats; 0: write no heartbeats.
        start: see `HeartbeatRecord`.

    Attributes:
        step: number of completed steps, set by the caller.
    """

    def __init__(self, folder: Path, rank: int, seconds: float, start: str = "") -> None:
        self.step, self._start = 0, start
        self._path, self._rank, self._seconds = folder / FOLDER / f"rank_{rank}", rank, seconds
        self._host, self._passes, self._last_progress = socket.gethostname(), 0, time.time()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="heartbeat", daemon=True)
        if seconds:
            self._thread.start()

    def beat(self) -> None:
        """Record progress of this rank."""
        self._passes += 1
        self._last_progress = time.time()

    def close(self) -> None:
        """Write the last heartbeat and stop."""
        if self._seconds:
            self._closed.set()
            self._thread.join()

    def _write_until_closed(self) -> None:
        ended = False
        while not ended:
            ended = self._closed.wait(self._seconds)
            try:
                self._write(ended)
            except OSError:  # not fatal: if the folder cannot be written, a write that the run needs will report it
                continue

    def _write(self, ended: bool) -> None:
        record = HeartbeatRecord(
            self._rank,
            self._host,
            os.getpid(),
            self._seconds,
            self.step,
            self._passes,
            self._last_progress,
            time.time(),
            ended,
            self._start,
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_to_write(self._path)
        try:
            os.pwrite(descriptor, (json.dumps(asdict(record)).ljust(_FILE_BYTES - 1) + "\n").encode(), 0)
        finally:
            os.close(descriptor)


def read_heartbeats(run_folder: Path, damaged: list[str] | None = None) -> list[HeartbeatRecord]:
    """Read the latest heartbeat of each rank of a run, ordered by rank. Invalid files are skipped.

    Args:
        run_folder: run folder.
        damaged: receives a message for each non-empty file without a valid heartbeat.
    """
    records = []
    for path in sorted((run_folder / FOLDER).glob("rank_*")):
        try:
            content = read_regular(path, 1 << 16)
            if content:
                records.append(_parse_heartbeat(content))
        except (OSError, ValueError, TypeError) as error:
            if damaged is not None:
                problem = (
                    f"cannot be read ({os_error_reason(error)})" if isinstance(error, OSError) else "is not a heartbeat"
                )
                damaged.append(f"{path}: {problem}")
    return sorted(records, key=lambda record: record.rank)


def _parse_heartbeat(content: bytes) -> HeartbeatRecord:
    """Parse the content of a heartbeat file.

    Raises:
        ValueError, TypeError: the content is invalid.
    """
    record = HeartbeatRecord(**parse_json(content))
    times = (record.seconds, record.further, record.written)
    # NaN fails the comparison.
    is_valid = all(type(value) in (int, float) and abs(value) < _MAX_ABSOLUTE_VALUE for value in times)
    integers = (record.rank, record.pid, record.step, record.passes)
    if not is_valid or any(type(value) is not int or abs(value) >= _MAX_ABSOLUTE_VALUE for value in integers):
        raise ValueError("invalid numbers")
    return replace(record, host=str(record.host), ended=bool(record.ended), start=str(record.start))


def remove_heartbeats(run_folder: Path) -> None:
    """Remove the heartbeats of an earlier start, which may have had more ranks."""
    for path in (run_folder / FOLDER).glob("rank_*"):
        path.unlink(missing_ok=True)


def describe_stalled_ranks(records: Sequence[HeartbeatRecord], now: float) -> list[str]:
    """Return a message for each rank that has stopped writing or that blocks the others.

    Args:
        records: heartbeats of a run.
        now: seconds since 1970.
    """
    messages, alive = [], []
    for record in records:
        silence = now - record.written
        if record.ended or silence <= 3 * record.seconds:
            alive.append(record)
        else:
            cause = "its process or machine has failed, stopped or is unreachable"
            messages.append(f"rank {record.rank} on {record.host} wrote no heartbeat for {silence:.0f} s: {cause}")
    # Only ranks without recent progress are compared. A rank with fewer passes than the median blocks the others.
    waiting = [record for record in alive if not record.ended and now - record.further > 3 * record.seconds]
    median_passes = median(record.passes for record in waiting) if waiting else 0
    for record in waiting:
        if record.passes < median_passes:
            behind = f"{record.passes} passes, while the median rank made {median_passes:g}"
            messages.append(f"rank {record.rank} on {record.host} is behind: {behind}")
    return messages
