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

from megatron_ext.utils.signals import handle_signals

_UNLOCKED_FILE = ".held.new"
_LOCK_FILE = ".held"
"""Name of a file in the folder that its process keeps locked.

The lock distinguishes a folder in use from one that a killed process has left.
"""


@contextmanager
def signals_as_exceptions() -> Iterator[list[BaseException]]:
    """Context manager that turns signals which would end the process into exceptions, with a shell's exit codes.

    The context manager has no effect outside the main thread.

    Yields:
        The exceptions that were raised by signals.
    """
    raised: list[BaseException] = []

    def raise_exception(number: int, _: object) -> NoReturn:
        raised.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise raised[-1]

    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    fatal = [number for number in signals if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]
    if threading.current_thread() is not threading.main_thread():
        fatal = []
    with handle_signals(fatal, raise_exception):
        yield raised


@contextmanager
def scratch_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Context manager that provides a temporary folder which only this user can read.

    The folder is empty except for a hidden file. It is removed at the end, also if a signal ends the process, unless
    `keep_folder` was called. SIGKILL or a lost machine leave it behind. The next call of the same kind on the machine
    removes it.

    Args:
        kind: word for the folder's name that describes its content.
        parent: folder to create it in; None: `TMPDIR`.

    Raises:
        OSError: the folder cannot be created.
    """
    # Several machines may share the disk and not see each other's locks.
    prefix = f"selectron-{kind}-{socket.gethostname()}-"
    _remove_unused(Path(tempfile.gettempdir()) if parent is None else parent, prefix)
    with signals_as_exceptions():
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            with (folder / _UNLOCKED_FILE).open("w") as lock:
                with suppress(OSError):  # without locks on this file system, the folder is never removed as unused
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(lock.name).rename(
                        folder / _LOCK_FILE
                    )  # renamed when locked, so that `_remove_unused` finds it locked
                yield folder
        finally:
            if (folder / _LOCK_FILE).exists() or (folder / _UNLOCKED_FILE).exists():
                shutil.rmtree(folder, ignore_errors=True)


def keep_folder(folder: Path) -> None:
    """Keep a scratch folder when its context ends; no later call removes it."""
    for name in (_LOCK_FILE, _UNLOCKED_FILE):
        (folder / name).unlink(missing_ok=True)


def user_folder() -> Path:
    """Return this user's folder in `TMPDIR`, which no other user can read or write.

    Raises:
        OSError: the folder cannot be created, or its name is taken.
    """
    folder = Path(tempfile.gettempdir()) / f"selectron-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "does not belong only to this user", str(folder))
    return folder


def _remove_unused(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose name begins with `prefix` and that no process uses. Links are not followed."""
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):  # in use, another user's, or already gone
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
