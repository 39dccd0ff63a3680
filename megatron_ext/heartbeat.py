"""How far each rank of a run is: a small file for each, which a thread of it writes over every few seconds.

Whoever looks for the rank that keeps all others waiting finds it there: it has made fewer passes than they, or writes
no more, as its process or its machine is gone or stopped.
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

from megatron_ext.files import open_to_write, os_reason, read_regular
from megatron_ext.json_text import parse_json

FOLDER = "heartbeats"
_MOST = 1 << 53
"""Above any number of a sign; Python's whole numbers may be too large for its own floats."""

_WIDTH = 320
"""Bytes of a file: it is written over in one call, so that a reader sees one line or the other."""


@dataclass(frozen=True)
class Sign:
    """What a rank last wrote; times in seconds since 1970, by the clock of its machine.

    Attributes:
        rank: its number.
        host: its machine.
        pid: its process there.
        seconds: between two signs.
        step: steps done.
        passes: forward passes, and what else it does in turn with the other ranks, since its start.
        further: when it last got further.
        written: when it wrote this.
        ended: whether it will write no more.
        start: token of the run's lock during this start of the run; empty: it is of older code.
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
    """Writes the signs of one rank, until it is closed.

    Args:
        folder: of the run.
        rank: this process's.
        seconds: between two signs; 0: none is written.
        start: see `Sign`.

    Attributes:
        step: steps done.
    """

    def __init__(self, folder: Path, rank: int, seconds: float, start: str = "") -> None:
        self.step, self._start = 0, start
        self._path, self._rank, self._seconds = folder / FOLDER / f"rank_{rank}", rank, seconds
        self._host, self._passes, self._further = socket.gethostname(), 0, time.time()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
        if seconds:
            self._thread.start()

    def beat(self) -> None:
        """Say that this rank has got further."""
        self._passes += 1
        self._further = time.time()

    def close(self) -> None:
        """Write a last sign, and no more."""
        if self._seconds:
            self._closed.set()
            self._thread.join()

    def _write_on(self) -> None:
        ended = False
        while not ended:
            ended = self._closed.wait(self._seconds)
            try:
                self._write(ended)
            except OSError:  # no reason to end a run: what it needs the disk for tells of that
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
    """Last signs of the ranks of a run, in the order of the ranks; files that hold none are left out.

    Args:
        run_folder: of the run.
        damaged: gets a line for each file that is not empty and holds no sign.
    """
    found = []
    for path in sorted((run_folder / FOLDER).glob("rank_*")):
        try:
            content = read_regular(path, 1 << 16)
            if content:
                found.append(_sign(content))
        except (OSError, ValueError, TypeError) as error:
            if damaged is not None:
                problem = (
                    f"cannot be read ({os_reason(error)})" if isinstance(error, OSError) else "is no sign of a rank"
                )
                damaged.append(f"{path}: {problem}")
    return sorted(found, key=lambda sign: sign.rank)


def _sign(content: bytes) -> Sign:
    """A sign from a file's content.

    Raises:
        ValueError, TypeError: it is none.
    """
    sign = Sign(**parse_json(content))
    numbers = (sign.seconds, sign.further, sign.written)
    is_sound = all(type(number) in (int, float) and abs(number) < _MOST for number in numbers)  # NaN is not
    counts = (sign.rank, sign.pid, sign.step, sign.passes)
    if not is_sound or any(type(number) is not int or abs(number) >= _MOST for number in counts):
        raise ValueError("no numbers")
    return replace(sign, host=str(sign.host), ended=bool(sign.ended), start=str(sign.start))


def forget(run_folder: Path) -> None:
    """Remove the signs of an earlier start, which may have had more ranks."""
    for path in (run_folder / FOLDER).glob("rank_*"):
        path.unlink(missing_ok=True)


def troubles(found: Sequence[Sign], now: float) -> list[str]:
    """A line for each rank that does not write, or that keeps the others waiting.

    Args:
        found: the signs of a run.
        now: seconds since 1970.
    """
    lines, alive = [], []
    for sign in found:
        silent = now - sign.written
        if sign.ended or silent <= 3 * sign.seconds:
            alive.append(sign)
        else:
            why = "its process or its machine is gone, stopped or cut off"
            lines.append(f"rank {sign.rank} on {sign.host} wrote nothing for {silent:.0f} s: {why}")
    # Who gets further is not kept from it; and what the others are waiting for was last done by none of them.
    waiting = [sign for sign in alive if not sign.ended and now - sign.further > 3 * sign.seconds]
    passes = median(sign.passes for sign in waiting) if waiting else 0
    for sign in waiting:
        if sign.passes < passes:
            behind = f"{sign.passes} passes, where the middle rank made {passes:g}"
            lines.append(f"rank {sign.rank} on {sign.host} is behind: {behind}")
    return lines
