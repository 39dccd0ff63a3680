"""Temporary folders that are removed when no longer needed, however their process ends."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from megatron_ext.utils.signals import handled

_NEW = ".held.new"
_HELD = ".held"
"""Name of a file in the folder that its process keeps locked.

The lock distinguishes a folder in use from one that a killed process has left.
"""


@contextmanager
def ended_by_exceptions() -> Iterator[list[BaseException]]:
    """Context manager that turns signals which would end the process into exceptions, with a shell's exit codes.

    The context manager has no effect outside the main thread.

    Yields:
        The exceptions that were raised by signals.
    """
    ends: list[BaseException] = []

    def end(number: int, _: object) -> NoReturn:
        ends.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise ends[-1]

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    ending = [number for number in numbers if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]
    if threading.current_thread() is not threading.main_thread():
        ending = []
    with handled(ending, end):
        yield ends


@contextmanager
def scratch_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Context manager that provides a folder which only this user can read, and removes it at the end; see `keep`.

    The folder is empty except for a hidden file. It is also removed if a signal ends the process. SIGKILL or a lost
    machine leave it behind; the next call of the same kind on the machine removes it.

    Args:
        kind: word for the folder's name that describes its content.
        parent: folder to create it in; None: `TMPDIR`.

    Raises:
        OSError: the folder cannot be created.
    """
    # Several machines may share the disk and not see each other's locks.
    start = f"selectron-{kind}-{socket.gethostname()}-"
    _clear(Path(tempfile.gettempdir()) if parent is None else parent, start)
    with ended_by_exceptions():
        folder = Path(tempfile.mkdtemp(prefix=start, dir=parent))
        try:
            with (folder / _NEW).open("w") as lock:
                with suppress(OSError):  # without locks on this file system, the folder is never removed as unused
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(lock.name).rename(folder / _HELD)  # renamed when locked, so that `_clear` finds it locked
                yield folder
        finally:
            if (folder / _HELD).exists() or (folder / _NEW).exists():
                shutil.rmtree(folder, ignore_errors=True)


def keep(folder: Path) -> None:
    """Keep a scratch folder when its context ends; no later call removes it."""
    for name in (_HELD, _NEW):
        (folder / name).unlink(missing_ok=True)


def own_folder() -> Path:
    """Return this user's folder in `TMPDIR`, which no other user can read or write.

    Raises:
        OSError: the folder cannot be created, or its name is taken.
    """
    folder = Path(tempfile.gettempdir()) / f"selectron-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "does not belong only to this user", str(folder))
    return folder


def _clear(parent: Path, start: str) -> None:
    """Remove this user's folders whose name begins with `start` and that no process uses. Links are not followed."""
    for folder in parent.glob(f"{glob.escape(start)}*"):
        with suppress(OSError):  # in use, another user's, or already gone
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
