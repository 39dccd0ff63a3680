"""Folders for a while: gone when they are no longer needed, whatever ends their process."""

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

from megatron_ext.signals import handled

_NEW = ".held.new"
_HELD = ".held"
"""File inside a folder that its process holds locked: tells one that is in use from one that a killed process left."""


@contextmanager
def ended_by_exceptions() -> Iterator[list[BaseException]]:
    """Within it, any signal that would end the process is an exception, as Ctrl-C is; exit codes are a shell's.

    Yields:
        The exceptions that were raised so.
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
    """A folder that only this user can read, removed when the block ends, be it by a signal; see `keep`.

    It is empty but for a hidden file of its own.

    SIGKILL, or a lost machine, leaves it there: the next call of this kind on the machine removes it.

    Args:
        kind: what is kept there, in a word, for its name.
        parent: folder that it lies in; None: on a disk of this machine (`TMPDIR`).

    Raises:
        OSError: the disk refuses.
    """
    # Several machines may share the disk, and see no locks of each other's.
    start = f"selectron-{kind}-{socket.gethostname()}-"
    _clear(Path(tempfile.gettempdir()) if parent is None else parent, start)
    with ended_by_exceptions():
        folder = Path(tempfile.mkdtemp(prefix=start, dir=parent))
        try:
            with (folder / _NEW).open("w") as lock:
                with suppress(OSError):  # of a disk without locks, where no call can tell what is in use
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(lock.name).rename(folder / _HELD)  # locked from the moment on at which others may find it
                yield folder
        finally:
            if (folder / _HELD).exists() or (folder / _NEW).exists():
                shutil.rmtree(folder, ignore_errors=True)


def keep(folder: Path) -> None:
    """Let a scratch folder stay when its block ends; no later call removes it."""
    for name in (_HELD, _NEW):
        (folder / name).unlink(missing_ok=True)


def own_folder() -> Path:
    """This user's folder in `TMPDIR`, which no other user can read or write.

    Raises:
        OSError: it cannot be made, or somebody else has made something else of that name.
    """
    folder = Path(tempfile.gettempdir()) / f"selectron-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not this user's alone", str(folder))
    return folder


def _clear(parent: Path, start: str) -> None:
    """Remove folders of which no process is at work any more: this user's own, and no links."""
    for folder in parent.glob(f"{glob.escape(start)}*"):
        with suppress(OSError):  # it is in use, of another user, or gone by now
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
