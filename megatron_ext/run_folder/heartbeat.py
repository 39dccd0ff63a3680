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

from megatron_ext.utils.atomic_files import open_to_write, os_reason, read_regular
from megatron_ext.utils.json_text import parse_json

FOLDER = "heartbeats"
_NUMBER_LIMIT = 1 << 53
"""Upper bound of the absolute values in a heartbeat. Larger integers may not fit a float."""

_WIDTH = 320
"""Size of a heartbeat file in bytes. The size is fixed and the file is overwritten in one call.

A reader therefore sees either the old or the new content.
"""


@dataclass(frozen=True)
class Sign:
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
        start: see `Sign`.

    Attributes:
        step: number of completed steps, set by the caller.
    """

    def __init__(self, folder: Path, rank: int, seconds: float, start: str = "") -> None:
        self.step, self._start = 0, start
        self._path, self._rank, self._seconds = folder / FOLDER / f"rank_{rank}", rank, seconds
        self._host, self._passes, self._further = socket.gethostname(), 0, time.time()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="heartbeat", daemon=True)
        if seconds:
            self._thread.start()

    def beat(self) -> None:
        """Record progress of this rank."""
        self._passes += 1
        self._further = time.time()

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
        sign = Sign(
            self._rank,
            self._host,
            os.getpid(),
            self._seconds,
            self.step,
            self._passes,
            self._further,
            time.time(),
            ended,
            self._start,
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open_to_write(self._path)
        try:
            os.pwrite(file, (json.dumps(asdict(sign)).ljust(_WIDTH - 1) + "\n").encode(), 0)
        finally:
            os.close(file)


def signs(run_folder: Path, damaged: list[str] | None = None) -> list[Sign]:
    """Read the latest heartbeat of each rank of a run, ordered by rank. Invalid files are skipped.

    Args:
        run_folder: run folder.
        damaged: receives a message for each non-empty file without a valid heartbeat.
    """
    found = []
    for path in sorted((run_folder / FOLDER).glob("rank_*")):
        try:
            content = read_regular(path, 1 << 16)
            if content:
                found.append(_sign(content))
        except (OSError, ValueError, TypeError) as error:
            if damaged is not None:
                problem = f"cannot be read ({os_reason(error)})" if isinstance(error, OSError) else "is not a heartbeat"
                damaged.append(f"{path}: {problem}")
    return sorted(found, key=lambda sign: sign.rank)


def _sign(content: bytes) -> Sign:
    """Parse the content of a heartbeat file.

    Raises:
        ValueError, TypeError: the content is invalid.
    """
    sign = Sign(**parse_json(content))
    numbers = (sign.seconds, sign.further, sign.written)
    is_sound = all(type(number) in (int, float) and abs(number) < _NUMBER_LIMIT for number in numbers)  # NaN is not
    counts = (sign.rank, sign.pid, sign.step, sign.passes)
    if not is_sound or any(type(number) is not int or abs(number) >= _NUMBER_LIMIT for number in counts):
        raise ValueError("invalid numbers")
    return replace(sign, host=str(sign.host), ended=bool(sign.ended), start=str(sign.start))


def forget(run_folder: Path) -> None:
    """Remove the heartbeats of an earlier start, which may have had more ranks."""
    for path in (run_folder / FOLDER).glob("rank_*"):
        path.unlink(missing_ok=True)


def troubles(found: Sequence[Sign], now: float) -> list[str]:
    """Return a message for each rank that has stopped writing or that blocks the others.

    Args:
        found: heartbeats of a run.
        now: seconds since 1970.
    """
    lines, alive = [], []
    for sign in found:
        silent = now - sign.written
        if sign.ended or silent <= 3 * sign.seconds:
            alive.append(sign)
        else:
            why = "its process or machine has failed, stopped or is unreachable"
            lines.append(f"rank {sign.rank} on {sign.host} wrote no heartbeat for {silent:.0f} s: {why}")
    # Only ranks without recent progress are compared. A rank with fewer passes than the median blocks the others.
    waiting = [sign for sign in alive if not sign.ended and now - sign.further > 3 * sign.seconds]
    passes = median(sign.passes for sign in waiting) if waiting else 0
    for sign in waiting:
        if sign.passes < passes:
            behind = f"{sign.passes} passes, while the median rank made {passes:g}"
            lines.append(f"rank {sign.rank} on {sign.host} is behind: {behind}")
    return lines
