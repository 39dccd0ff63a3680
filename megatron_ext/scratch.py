"""Folders for a while: gone when they are no longer needed, whatever ends their process."""

from __future__ import annotations

import fcntl
import glob
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from megatron_ext.signals import handled

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
def scratch_folder(kind: str) -> Iterator[Path]:
    """An empty folder on a disk of this machine (`TMPDIR`), removed when the block ends, be it by a signal.

    SIGKILL, or a lost machine, leaves it there: the next call of this kind on the machine removes it.

    Args:
        kind: what is kept there, in a word, for its name.

    Raises:
        OSError: the disk refuses.
    """
    # Several machines may share the disk, and see no locks of each other's.
    start = f"selectron-{kind}-{socket.gethostname()}-"
    _clear(start)
    with ended_by_exceptions(), tempfile.TemporaryDirectory(prefix=start, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / f"{_HELD}.new").open("w") as lock:
            with suppress(OSError):  # of a disk without locks, where no call can tell what is in use
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(lock.name).rename(folder / _HELD)  # locked from the moment on at which another call may find it
            yield folder


def _clear(start: str) -> None:
    """Remove folders of which no process is at work any more."""
    for held in Path(tempfile.gettempdir()).glob(f"{glob.escape(start)}*/{_HELD}"):
        with suppress(OSError), held.open("r+") as lock:  # it is in use, of another user, or gone by now
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(held.parent)
