"""Lock on a run's folder: one process at a time trains a run, or submits a job of it.

The lock is a folder of files `1`, `2`, ...; the highest holds the lock. A file is created whole, by link(), which is
atomic on NFS, and says who holds the lock: host, pid, Slurm job, since when. The holder changes a counter in it every
few seconds. Whoever finds the holder gone creates the next number, so of several only one succeeds, and removes the
files before it. The number thereby is a fencing token: a holder that was only slow finds its file gone or a higher one
beside it, and ends before it writes anything more.

A holder is gone if it released the lock; if its file was copied with the run's folder, and the original is there; if it
was of the same machine and its process is no more; if it was an earlier start of this process's own Slurm job; or if
its file did not change for `DEAD_SECONDS`. That is measured by this process's own monotonic clock or by the times that
the file server itself gives its files, never by comparing the clocks of two machines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.files import os_reason
from megatron_ext.run_folder import lock_file
from megatron_ext.run_folder.lock_file import DEAD_SECONDS, Holder
from megatron_ext.run_folder.process_identity import ProcessIdentity, this_process

FOLDER = "lock"
BEAT_SECONDS = 5.0
CONFIRM_SECONDS = 12.0
"""Seconds for which a file that is old by the server's clock must stay unchanged besides: that clock may be set."""

GRACE_SECONDS = 30.0
"""Seconds in which a process whose lock is lost may end by itself."""

_POLL_SECONDS = 0.5
_TRIES, _TRY_SECONDS = 500, 0.01
_CHECK_SECONDS = 1.0
_ENDS = "this process writes nothing more to it and ends"
_UNKNOWN = "a process that does not say who it is"


class LockLost(UserError):
    """Another process has taken the lock over, or its folder was removed."""


@dataclass(frozen=True)
class Clock:
    """Time as waiting for a holder needs it; tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


class RunLock:
    """A lock that this process holds; see `take`.

    Args:
        folder: of the lock's files.
        holder: this process.
        what: that is locked, as messages name it.
    """

    def __init__(self, folder: Path, holder: Holder, what: str) -> None:
        self.holder, self._folder, self._what = holder, folder, what
        self._path = folder / str(holder.number)
        self._beats, self._checked = 0, time.monotonic()

    @property
    def token(self) -> str:
        """Unique to this time that the lock was taken."""
        return self.holder.token

    def check(self) -> None:
        """Refuse to go on if the lock is lost; to be called before anything is written.

        Raises:
            LockLost: it is.
        """
        try:
            ours = lock_file.read(self._path)
            newest = max(lock_file.numbers(self._folder), default=0)
        except FileNotFoundError:
            ours, newest = None, 0
        except OSError as error:
            if error.errno != errno.ESTALE:
                return  # a server that does not answer has not given the lock to another process
            ours, newest = None, 0
        if newest == self.holder.number and ours is not None and ours.token == self.token:
            self._checked = time.monotonic()
            return
        other = lock_file.read_holder(self._folder)
        if other is None or other.token == self.token:
            raise LockLost(
                self._what, "its folder was removed or replaced while it was held", "nothing more is written"
            )
        raise LockLost(self._what, f"was taken over by {other}", _ENDS)

    def check_soon(self) -> None:
        """`check`, if the last one is more than a second ago: for what is written very often."""
        if time.monotonic() - self._checked >= _CHECK_SECONDS:
            self.check()

    def beat(self) -> None:
        """Change the lock's file, so that others see that this process still holds it.

        Raises:
            LockLost: it does not.
        """
        self.check()
        self._beats += 1
        self._write(released=False)

    def release(self) -> None:
        """Give the lock up. The file stays, as the next number follows it; a run's folder with nothing else goes."""
        try:
            self.check()
            self._write(released=True)
            if [path.name for path in self._folder.parent.iterdir()] == [self._folder.name]:
                self._path.unlink()
                self._folder.rmdir()
                self._folder.parent.rmdir()
        except (OSError, LockLost):
            return  # it is not ours to change any more, or the disk refuses: then it is taken over as a dead one's

    def _write(self, *, released: bool) -> None:
        """Overwrite the file, unless its name belongs to another one: the open file is the one that was checked."""
        file = os.open(self._path, os.O_RDWR)
        try:
            found = lock_file.parsed(os.pread(file, 2 * lock_file.WIDTH, 0))
            if found is not None and found.token == self.token:
                content = asdict(self.holder) | {"beats": self._beats, "released": released}
                os.pwrite(file, lock_file.line(content), 0)
                os.fsync(file)
        finally:
            os.close(file)


def take(
    folder: Path,
    what: str,
    *,
    hint: str = "",
    me: ProcessIdentity | None = None,
    clock: Clock | None = None,
    say: Callable[[str], object] | None = None,
) -> RunLock:
    """Take a lock.

    Args:
        folder: of the lock's files, made if it is not there; its parent is the run's.
        what: that is locked, as messages name it.
        hint: what a user can do where it is held; empty: how the holder is waited for or ended.
        me: the process that takes it; None: this one.
        clock: None: the machine's.
        say: prints a line; None: to standard error.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    me, clock, say = me or this_process(), clock or Clock(), say or _say
    watched = _Watched(what, clock, say)
    try:
        for _ in range(_TRIES):
            try:
                lock = _try(folder, what, hint, me, watched)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                lock = None  # the holder's file was removed in this moment
            if lock is not None:
                return lock
            clock.sleep(_TRY_SECONDS)
    except OSError as error:
        raise UserError(str(folder), f"cannot be written ({os_reason(error)})", "choose another run.dir") from error
    raise UserError(str(folder), f"could not be locked in {_TRIES} tries", "look what its files are, or remove it")


def _try(folder: Path, what: str, hint: str, me: ProcessIdentity, watched: _Watched) -> RunLock | None:
    """Take a lock; None: another process was faster, and may be done already."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(lock_file.numbers(folder), default=0)
    if newest and not watched.is_gone(folder / str(newest), me):
        holder = lock_file.read(folder / str(newest))
        raise UserError(what, f"is held by {holder or _UNKNOWN}", hint or lock_file.ending(holder))
    created = lock_file.create(folder, newest + 1, me)
    return None if created is None else RunLock(folder, created, what)


@contextlib.contextmanager
def held(*locks: RunLock, on_stuck: Callable[[LockLost], object] | None = None) -> Iterator[None]:
    """Within it a thread beats for locks; behind it they are released.

    Args:
        locks: that this process has taken.
        on_stuck: called by that thread if a lock is lost and this context is still open `GRACE_SECONDS` later.
    """
    closed, lost = threading.Event(), set[str]()

    def keep_beating() -> None:
        while not closed.wait(BEAT_SECONDS):
            for lock in locks:
                try:
                    if lock.token not in lost:
                        lock.beat()
                except LockLost as error:
                    lost.add(lock.token)
                    if on_stuck is not None and not closed.wait(GRACE_SECONDS):
                        on_stuck(error)
                except OSError:  # the next may come through; until then others may take the lock over
                    continue

    thread = threading.Thread(target=keep_beating, name="run-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        for lock in locks:
            lock.release()


class _Watched:
    """Whether a holder is gone, by looking at its file for as long as that takes.

    Args:
        what: that is locked.
        clock: measures the time without change.
        say: prints what is waited for.
    """

    def __init__(self, what: str, clock: Clock, say: Callable[[str], object]) -> None:
        self._what, self._clock, self._say = what, clock, say

    def is_gone(self, path: Path, me: ProcessIdentity) -> bool:
        """Whether the holder of a file no longer holds the lock.

        What the file and the system say decides at once. Where they do not, as of a process on another machine, the
        file is watched: until it changes, which a living holder does every few seconds (a last change may be its
        release), or has been unchanged for so long that the holder counts as gone.

        Raises:
            FileNotFoundError: the file is removed meanwhile.
        """
        holder = lock_file.read(path)
        if holder is not None:
            if holder.released or lock_file.is_copy(path, holder):
                return True
            if me.job is not None and holder.process.job == me.job and holder.process.restarts != me.restarts:
                return holder.process.restarts < me.restarts  # Slurm starts a job anew once it has ended it
            exists = holder.process.exists()
            if exists is not None:
                return not exists
        quiet = min(max(lock_file.quiet_seconds(path), 0.0), DEAD_SECONDS)
        patience = max(DEAD_SECONDS - quiet, CONFIRM_SECONDS)
        self._say(f"{self._what} was held by {holder or _UNKNOWN}: up to {patience:.0f} s to see whether it still runs")
        first, began = lock_file.raw(path), self._clock.now()
        while self._clock.now() - began < patience:
            self._clock.sleep(_POLL_SECONDS)
            if (now := lock_file.raw(path)) != first:
                found = lock_file.parsed(now)
                return found is not None and found.released
        return True


def _say(line: str) -> None:
    print(f"selectron: {line}", file=sys.stderr, flush=True)
