"""Lock on a run folder: one process at a time trains a run, or submits a job for it.

The lock is a folder of files `1`, `2`, ... The process that created the file with the highest number holds the lock. A
file is created atomically by link(), which also works on NFS. The file records the holder (host, pid, Slurm job, start
time) and a counter that the holder updates every few seconds. A process that finds the holder dead creates the file
with the next number, which only one process can do, and removes the earlier files. The number is thus a fencing token.
A holder that was only slow finds that its file was removed or that a higher number exists, and exits before it writes
anything else.

A holder counts as dead if one of these holds:
- It released the lock.
- Its file was copied with the run folder, and the original still exists.
- It ran on this machine and its process no longer exists.
- It was an earlier start of this process's own Slurm job.
- Its file did not change for `DEAD_SECONDS`, measured by this process's monotonic clock or by the file server's
  timestamps. Clocks of two machines are never compared.
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

from megatron_ext.run_folder import lock_file
from megatron_ext.run_folder.lock_file import DEAD_SECONDS, Holder
from megatron_ext.run_folder.process_identity import ProcessIdentity, this_process
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError

FOLDER = "lock"
BEAT_SECONDS = 5.0
CONFIRM_SECONDS = 12.0
"""Minimum seconds for which a file is observed before its holder counts as dead.

This applies even if the file is old by the server's clock, because that clock may be wrong.
"""

GRACE_SECONDS = 30.0
"""Seconds after the loss of a lock in which the process may exit by itself before `on_stuck` is called."""

_POLL_SECONDS = 0.5
_MAX_ATTEMPTS, _RETRY_SECONDS = 500, 0.01
_CHECK_SECONDS = 1.0
_LOST_HINT = "this process exits and writes nothing more to it"
_UNIDENTIFIED = "an unidentified process"


class LockLost(UserError):
    """Loss of a lock, because another process took it over or its folder was removed."""


@dataclass(frozen=True)
class Clock:
    """Time source used while waiting for a holder. Tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


class RunLock:
    """Lock held by this process. Create it with `acquire`.

    Args:
        folder: folder of the lock files.
        holder: this process.
        label: name of the locked object in messages.
    """

    def __init__(self, folder: Path, holder: Holder, label: str) -> None:
        self.holder, self._folder, self._label = holder, folder, label
        self._path = folder / str(holder.number)
        self._beats, self._checked = 0, time.monotonic()

    @property
    def token(self) -> str:
        """Unique identifier of this acquisition of the lock."""
        return self.holder.token

    def check(self) -> None:
        """Raise if the lock is lost. Call this before each write to the run folder.

        Raises:
            LockLost: the lock is lost.
        """
        try:
            current = lock_file.read(self._path)
            newest = max(lock_file.lock_numbers(self._folder), default=0)
        except FileNotFoundError:
            current, newest = None, 0
        except OSError as error:
            if error.errno != errno.ESTALE:
                return  # an unreachable server does not imply that the lock was lost
            current, newest = None, 0
        if newest == self.holder.number and current is not None and current.token == self.token:
            self._checked = time.monotonic()
            return
        other = lock_file.read_newest_holder(self._folder)
        if other is None or other.token == self.token:
            raise LockLost(
                self._label, "its folder was removed or replaced while it was held", "nothing more is written"
            )
        raise LockLost(self._label, f"was taken over by {other}", _LOST_HINT)

    def check_if_due(self) -> None:
        """Call `check` unless it succeeded within the last second. Call this before frequent writes."""
        if time.monotonic() - self._checked >= _CHECK_SECONDS:
            self.check()

    def beat(self) -> None:
        """Update the lock file, so that others see that this process still holds the lock.

        Raises:
            LockLost: the lock is lost.
        """
        self.check()
        self._beats += 1
        self._write(released=False)

    def release(self) -> None:
        """Release the lock.

        The lock file is kept, because the next lock file needs a higher number. If the run folder contains nothing but
        the lock, both are removed.
        """
        try:
            self.check()
            self._write(released=True)
            if [path.name for path in self._folder.parent.iterdir()] == [self._folder.name]:
                self._path.unlink()
                self._folder.rmdir()
                self._folder.parent.rmdir()
        except (OSError, LockLost):
            return  # the lock was lost, or the write failed; in the latter case others will treat this holder as dead

    def _write(self, *, released: bool) -> None:
        """Overwrite the lock file if it is still this holder's.

        The token is checked through the descriptor that is written, in case another file has replaced the path.
        """
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            found = lock_file.parse_holder(os.pread(descriptor, 2 * lock_file.FILE_BYTES, 0))
            if found is not None and found.token == self.token:
                content = asdict(self.holder) | {"beats": self._beats, "released": released}
                os.pwrite(descriptor, lock_file.encode_fields(content), 0)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def acquire(
    folder: Path,
    label: str,
    *,
    hint: str = "",
    process: ProcessIdentity | None = None,
    clock: Clock | None = None,
    print_line: Callable[[str], object] | None = None,
) -> RunLock:
    """Acquire a lock.

    Args:
        folder: folder of the lock files, a direct subfolder of the run folder. It is created if it is missing.
        label: name of the locked object in messages.
        hint: advice in the error if the lock is held. Empty: how to wait for the holder or stop it.
        process: the acquiring process. None: this process.
        clock: time source. None: the machine's clock.
        print_line: function that prints a line. None: print to standard error.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written.
    """
    process, clock, print_line = process or this_process(), clock or Clock(), print_line or _print_line
    watch = _HolderWatch(label, clock, print_line)
    try:
        for _ in range(_MAX_ATTEMPTS):
            try:
                lock = _try_acquire(folder, label, hint, process, watch)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                lock = None  # the holder's file was removed concurrently
            if lock is not None:
                return lock
            clock.sleep(_RETRY_SECONDS)
    except OSError as error:
        raise UserError(
            str(folder), f"cannot be written ({os_error_reason(error)})", "choose another run.dir"
        ) from error
    raise UserError(str(folder), f"could not be locked in {_MAX_ATTEMPTS} attempts", "inspect its files, or remove it")


def _try_acquire(folder: Path, label: str, hint: str, process: ProcessIdentity, watch: _HolderWatch) -> RunLock | None:
    """Try to acquire a lock. Return None if another process was faster, which may have released the lock since.

    Raises:
        UserError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(lock_file.lock_numbers(folder), default=0)
    if newest and not watch.is_gone(folder / str(newest), process):
        holder = lock_file.read(folder / str(newest))
        raise UserError(label, f"is held by {holder or _UNIDENTIFIED}", hint or lock_file.release_hint(holder))
    created = lock_file.create(folder, newest + 1, process)
    return None if created is None else RunLock(folder, created, label)


@contextlib.contextmanager
def hold_locks(*locks: RunLock, on_stuck: Callable[[LockLost], object] | None = None) -> Iterator[None]:
    """Context manager that keeps locks alive from a thread, and releases them on exit.

    Args:
        locks: locks that this process has acquired.
        on_stuck: function called by the thread if a lock is lost and the context is still open after `GRACE_SECONDS`.
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
                except OSError:  # a later beat may succeed, unless another process takes the lock over first
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


class _HolderWatch:
    """Detection of dead holders by observing their lock file.

    Args:
        label: name of the locked object in messages.
        clock: measures the time without change.
        print_line: prints messages while waiting.
    """

    def __init__(self, label: str, clock: Clock, print_line: Callable[[str], object]) -> None:
        self._label, self._clock, self._print_line = label, clock, print_line

    def is_gone(self, path: Path, process: ProcessIdentity) -> bool:
        """Return whether the holder of a file no longer holds the lock.

        The file's content and the operating system often decide this at once, but not for a process on another machine.
        The file is then observed until it changes, or until it was unchanged for so long that the holder counts as
        dead. A live holder updates the file every few seconds. A change may also be the release of the lock.

        Raises:
            FileNotFoundError: the file was removed during the observation.
        """
        holder = lock_file.read(path)
        if holder is not None:
            if holder.released or lock_file.is_copy(path, holder):
                return True
            if (
                process.job is not None
                and holder.process.job == process.job
                and holder.process.restarts != process.restarts
            ):
                return holder.process.restarts < process.restarts  # Slurm ends a job before it restarts it
            exists = holder.process.exists()
            if exists is not None:
                return not exists
        unchanged = min(max(lock_file.unchanged_seconds(path), 0.0), DEAD_SECONDS)
        timeout = max(DEAD_SECONDS - unchanged, CONFIRM_SECONDS)
        notice = f"waiting up to {timeout:.0f} s to see whether it still runs"
        self._print_line(f"{self._label} was held by {holder or _UNIDENTIFIED}: {notice}")
        first_content, start = lock_file.read_content(path), self._clock.now()
        while self._clock.now() - start < timeout:
            self._clock.sleep(_POLL_SECONDS)
            if (content := lock_file.read_content(path)) != first_content:
                found = lock_file.parse_holder(content)
                return found is not None and found.released
        return True


def _print_line(line: str) -> None:
    print(f"selectron: {line}", file=sys.stderr, flush=True)
