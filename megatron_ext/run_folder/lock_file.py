"""Lock files: content, creation, reading and time of the last change. The module `lock` describes the protocol."""

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

from megatron_ext.run_folder.process_identity import ProcessIdentity
from megatron_ext.utils.atomic_files import open_regular

DEAD_SECONDS = 60.0
"""Seconds without a change of its lock file after which a holder counts as dead."""

LAUNCH_VARIABLE = "SELECTRON_LAUNCH"
"""Environment variable with the number of the launched job that a process belongs to."""

_JOB_ID = re.compile(r"[0-9]{1,12}")
_MAX_STRING_LENGTH = 400
FILE_BYTES = 2048
"""Size of a lock file in bytes. The size is fixed, so that the file is overwritten in one call."""
_NO_HARD_LINK_ERRORS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class Holder:
    """Content of a lock file.

    Attributes:
        number: number that is the file's name.
        token: unique identifier of this acquisition.
        process: process that acquired the lock.
        since: time of the acquisition by the clock of its machine, UTC, ISO 8601.
        beats: counter that the process increases while it holds the lock.
        released: True once the lock is released.
        launch: number N of the launched job, RUN/launch/N, that the process belongs to. Empty: started manually.
        output: file that receives the process's standard error. Empty: a terminal or a pipe.
        folder: absolute path of the lock folder as the process sees it. Empty: too long, or unknown.
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
        """Return the holder's description for messages."""
        return f"{self.process}, since {self.since}"


def release_hint(holder: Holder | None) -> str:
    """Return advice on how to wait for a holder or stop it."""
    if holder is None:
        return "wait until it exits, or stop it on its machine"
    process = holder.process
    is_job_id = process.job is not None and _JOB_ID.fullmatch(process.job)  # the file is untrusted
    command = f"`scancel {process.job}`" if is_job_id else f"`kill {process.pid}` on its machine"
    return f"wait until it exits, or stop it: {command}"


@dataclass(frozen=True)
class LockState:
    """State of a lock as seen by another process.

    Attributes:
        holder: holder recorded in the file with the highest number. None: the file is invalid.
        is_held: True if the lock is held, as far as can be determined without waiting.
        unchanged_seconds: seconds since that file changed, by the file server's clock.
    """

    holder: Holder | None
    is_held: bool
    unchanged_seconds: float


def create(folder: Path, number: int, process: ProcessIdentity) -> Holder | None:
    """Create the lock file `number` and remove the files with lower numbers.

    Returns:
        The new holder, or None if another process created this file or a file with a higher number.
    """
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    launch = os.environ.get(LAUNCH_VARIABLE, "")[:_MAX_STRING_LENGTH]
    folder_path = str(folder.absolute())
    folder_path = folder_path if len(json.dumps(folder_path)) <= _MAX_STRING_LENGTH else ""
    holder = Holder(number, uuid.uuid4().hex, process, since, launch=launch, output=_stderr_path(), folder=folder_path)
    path = folder / str(number)
    temp_path = folder / f".{holder.token}"
    try:
        temp_path.write_bytes(encode_fields(asdict(holder)))
        try:
            os.link(temp_path, path)
        except FileExistsError:
            pass  # checked below: NFS may retry a call whose reply was lost
        except OSError as error:
            if error.errno not in _NO_HARD_LINK_ERRORS:
                raise
            with contextlib.suppress(FileExistsError), path.open("xb") as file:  # the file system has no hard links
                file.write(encode_fields(asdict(holder)))
    finally:
        temp_path.unlink(missing_ok=True)
    found = read(path)
    if found is None or found.token != holder.token:
        return None
    existing = lock_numbers(folder)
    if max(existing, default=0) != number:  # created late, after higher numbers
        path.unlink(missing_ok=True)
        return None
    for old in existing:
        if old < number:
            (folder / str(old)).unlink(missing_ok=True)
    return holder


def _stderr_path() -> str:
    """Return the path of this process's standard error, or an empty string if it is not a regular file."""
    try:
        path = os.readlink("/proc/self/fd/2")
        is_usable = Path(path).is_file() and len(json.dumps(path)) <= _MAX_STRING_LENGTH
    except (OSError, ValueError):
        return ""
    return path if is_usable else ""


def lock_numbers(folder: Path) -> list[int]:
    """Return the numbers of the lock files in a folder."""
    return [int(name) for name in os.listdir(folder) if name.isascii() and name.isdecimal()]


def read_content(path: Path) -> bytes:
    """Return the content of a file. The file is opened for each call, so that NFS revalidates it with the server."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(2 * FILE_BYTES)


def read(path: Path) -> Holder | None:
    """Return the holder in a file, or None if the content is invalid."""
    return parse_holder(read_content(path))


def parse_holder(content: bytes) -> Holder | None:
    """Return the holder in a file's content, or None if the content is invalid."""
    try:
        fields: dict[str, Any] = json.loads(content)
        holder = Holder(**fields | {"process": ProcessIdentity(**fields["process"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    process = holder.process
    strings = (
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
    integers = (holder.number, holder.beats, process.restarts, process.pid)
    is_valid = all(isinstance(value, str) for value in strings) and all(type(number) is int for number in integers)
    return holder if is_valid and 0 < process.pid < 1 << 31 else None


def is_copy(path: Path, holder: Holder) -> bool:
    """Return whether a lock file was copied with its run folder while the original still exists.

    If the run folder was moved instead, there is no original, and the holder keeps the lock.

    Args:
        path: path of the lock file.
        holder: holder recorded in the lock file.
    """
    if not holder.folder:
        return False
    original = Path(holder.folder) / str(holder.number)
    try:
        found = read(original)
        if found is None or found.token != holder.token or original.parent.resolve() == path.parent.resolve():
            return False
        # If one folder is mounted twice, the devices may differ but the inodes are equal.
        return original.parent.stat().st_ino != path.parent.stat().st_ino
    except (OSError, ValueError):
        return False


def encode_fields(fields: dict[str, Any]) -> bytes:
    """Return the content of a file, padded to a fixed length."""
    return (json.dumps(fields).ljust(FILE_BYTES - 1) + "\n").encode()


def unchanged_seconds(path: Path) -> float:
    """Return the seconds since a file changed, with both times from the file server's clock."""
    probe = path.with_name(f".now-{uuid.uuid4().hex}")
    try:
        probe.touch(exist_ok=False)
        now = probe.stat().st_mtime
    except OSError:  # no write permission: fall back to the local clock
        now = time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return now - path.stat().st_mtime


def lock_state(folder: Path) -> LockState | None:
    """Return the state of a lock without waiting, or None if there is no lock.

    A holder on another machine counts as holding the lock if its file changed within the last `DEAD_SECONDS`. If the
    file's timestamp is further than that in the future, the server's clock was set back after the change, and the
    holder does not count as holding the lock.
    """
    try:
        newest = max(lock_numbers(folder), default=0)
        if not newest:
            return None
        path = folder / str(newest)
        holder, unchanged = read(path), unchanged_seconds(path)
    except OSError:
        return None
    if holder is not None and is_copy(path, holder):
        return LockState(holder, False, unchanged)
    exists = None if holder is None else holder.process.exists()
    is_held = not (holder and holder.released) and (abs(unchanged) < DEAD_SECONDS if exists is None else exists)
    return LockState(holder, is_held, unchanged)


def read_newest_holder(folder: Path) -> Holder | None:
    """Return the holder in the file with the highest number, alive or not. None: no lock, or an unreadable file."""
    try:
        newest = max(lock_numbers(folder), default=0)
        return read(folder / str(newest)) if newest else None
    except OSError:
        return None
