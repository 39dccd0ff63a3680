"""Files of a lock: what they hold, how they are created and read, and when they last changed. See `lock`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.files import open_regular
from megatron_ext.run_folder.process_identity import ProcessIdentity

DEAD_SECONDS = 60.0
"""Seconds without a change after which a holder counts as gone."""

LAUNCH_VARIABLE = "SELECTRON_LAUNCH"
"""Environment variable: number of the launched job that a process belongs to."""

_JOB = re.compile(r"[0-9]{1,12}")
_LONGEST = 400
WIDTH = 2048
"""Bytes of a file, which is overwritten in one call."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class Holder:
    """Content of a lock's file.

    Attributes:
        number: of the file.
        token: unique to this time that the lock was taken.
        process: that took it.
        since: when, UTC, ISO 8601, by its machine's clock.
        beats: counter that changes while it holds the lock.
        released: whether it has given the lock up.
        launch: number of the launched job of the run, RUN/launch/N, that it belongs to; empty: it was begun by hand.
        output: file that it prints to; empty: a terminal or a pipe.
        folder: of the lock, absolute, as the process that took it sees it; empty: too long, or not known.
    """

    number: int
    token: str
    process: ProcessIdentity
    since: str
    beats: int = 0
    released: bool = False
    launch: str = ""
    output: str = ""
    folder: str = ""

    def __str__(self) -> str:
        """As a message names it."""
        return f"{self.process}, since {self.since}"


def ending(holder: Holder | None) -> str:
    """What a user can do where a process holds a lock, in words."""
    if holder is None:
        return "wait until it ends, or end it where it runs"
    process = holder.process
    is_number = process.job is not None and _JOB.fullmatch(process.job)  # a file may say anything
    how = f"`scancel {process.job}`" if is_number else f"`kill {process.pid}` on its machine"
    return f"wait until it ends, or end it: {how}"


@dataclass(frozen=True)
class LockState:
    """A lock as another process sees it.

    Attributes:
        holder: of the highest number; None: its file cannot be read as one.
        is_held: whether the holder holds it, as far as can be said at once.
        quiet_seconds: since its file changed, by the file server's clock.
    """

    holder: Holder | None
    is_held: bool
    quiet_seconds: float


def create(folder: Path, number: int, me: ProcessIdentity) -> Holder | None:
    """Create a number's file, if nobody else has, and remove those before it; None: somebody has."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    launch = os.environ.get(LAUNCH_VARIABLE, "")[:_LONGEST]
    where = str(folder.absolute())
    where = where if len(json.dumps(where)) <= _LONGEST else ""
    holder = Holder(number, uuid.uuid4().hex, me, since, launch=launch, output=_output(), folder=where)
    path = folder / str(number)
    beside = folder / f".{holder.token}"
    try:
        beside.write_bytes(line(asdict(holder)))
        try:
            os.link(beside, path)
        except FileExistsError:
            pass  # told apart below: a server may repeat a call whose answer was lost
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with contextlib.suppress(FileExistsError), path.open("xb") as file:  # a file system without links
                file.write(line(asdict(holder)))
    finally:
        beside.unlink(missing_ok=True)
    found = read(path)
    if found is None or found.token != holder.token:
        return None
    there = numbers(folder)
    if max(there, default=0) != number:  # found late, when others had followed
        path.unlink(missing_ok=True)
        return None
    for old in there:
        if old < number:
            (folder / str(old)).unlink(missing_ok=True)
    return holder


def _output() -> str:
    """The file that this process's standard error goes to; empty: it is none that can be read later."""
    try:
        path = os.readlink("/proc/self/fd/2")
        is_kept = Path(path).is_file() and len(json.dumps(path)) <= _LONGEST
    except (OSError, ValueError):
        return ""
    return path if is_kept else ""


def numbers(folder: Path) -> list[int]:
    """Numbers of the files of a lock."""
    return [int(name) for name in os.listdir(folder) if name.isascii() and name.isdecimal()]


def raw(path: Path) -> bytes:
    """Content of a file; to open it makes NFS ask the server whether it has changed."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(2 * WIDTH)


def read(path: Path) -> Holder | None:
    """The holder that a file names; None: it names none."""
    return parsed(raw(path))


def parsed(content: bytes) -> Holder | None:
    """The holder that a file's content names; None: it names none."""
    try:
        fields: dict[str, Any] = json.loads(content)
        holder = Holder(**fields | {"process": ProcessIdentity(**fields["process"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    process = holder.process
    texts = (
        holder.token,
        holder.since,
        holder.launch,
        holder.output,
        holder.folder,
        process.host,
        process.pids,
        process.started,
        process.job or "",
    )
    whole = (holder.number, holder.beats, process.restarts, process.pid)
    is_sound = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in whole)
    return holder if is_sound and 0 < process.pid < 1 << 31 else None


def is_copy(path: Path, holder: Holder) -> bool:
    """Whether a lock's file was copied with its run's folder, and its holder holds the original.

    Only where the original is there to be seen: a folder that was moved is held by the process that held it before.

    Args:
        path: of the file.
        holder: that it names.
    """
    if not holder.folder:
        return False
    original = Path(holder.folder) / str(holder.number)
    try:
        found = read(original)
        if found is None or found.token != holder.token or original.parent.resolve() == path.parent.resolve():
            return False
        # Of one folder that is mounted twice the devices may differ, the inodes do not.
        return original.parent.stat().st_ino != path.parent.stat().st_ino
    except (OSError, ValueError):
        return False


def line(fields: dict[str, Any]) -> bytes:
    """Content of a file, always of one length."""
    return (json.dumps(fields).ljust(WIDTH - 1) + "\n").encode()


def quiet_seconds(path: Path) -> float:
    """Seconds since a file changed, both ends by the clock of the server that keeps it."""
    probe = path.with_name(f".now-{uuid.uuid4().hex}")
    try:
        probe.touch(exist_ok=False)
        now = probe.stat().st_mtime
    except OSError:  # a reader who may not write: the machine's clock must do
        now = time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return now - path.stat().st_mtime


def lock_state(folder: Path) -> LockState | None:
    """How a lock stands; None: there is none.

    Nothing is waited for: a holder on another machine counts as holding it if its file changed in the last
    `DEAD_SECONDS`. One from further in the future has not changed since the server's clock was set back.
    """
    try:
        newest = max(numbers(folder), default=0)
        if not newest:
            return None
        path = folder / str(newest)
        holder, quiet = read(path), quiet_seconds(path)
    except OSError:
        return None
    if holder is not None and is_copy(path, holder):
        return LockState(holder, False, quiet)
    exists = None if holder is None else holder.process.exists()
    is_held = not (holder and holder.released) and (abs(quiet) < DEAD_SECONDS if exists is None else exists)
    return LockState(holder, is_held, quiet)


def read_holder(folder: Path) -> Holder | None:
    """The holder of the highest number, be it alive or not; None: there is none, or it cannot be read."""
    try:
        newest = max(numbers(folder), default=0)
        return read(folder / str(newest)) if newest else None
    except OSError:
        return None
