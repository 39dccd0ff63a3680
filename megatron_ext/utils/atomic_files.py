"""Atomic file writes (temporary file, fsync, rename), and safe opening of regular files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

MAX_READ_BYTES = 1 << 30
"""Maximum size in bytes of a file that is read whole; records of a million steps take a third of it."""

MAX_POINTER_BYTES = 1 << 16
"""Maximum size in bytes of a file with a name or a number."""

MAX_VOCABULARY_BYTES = 1 << 27
"""Maximum size in bytes of a tokenizer or index file; a million tokens take half of it. Parsing takes several times as
much memory.
"""


def is_url(path: str) -> bool:
    """Return whether a name is a URL such as s3://bucket/folder, not a local path."""
    return "://" in path


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def os_error_reason(error: OSError) -> str:
    """Return the reason of an error in one line.

    Errors of several files (`shutil.Error`) and of libraries have no `strerror`.
    """
    if error.strerror:
        return error.strerror
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        reasons = [str(failure[-1]) for failure in error.args[0]]
        more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        return f"{' '.join(reasons[0].split())}{more}"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def rename_when_complete(temp_path: Path, path: Path) -> Iterator[None]:
    """Context manager in which the caller writes `temp_path`, which is then flushed to disk and renamed to `path`.

    An exception removes `temp_path`.
    """
    try:
        yield
        fsync_path(temp_path)
        temp_path.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temp_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # errors of write() lack the file name
            error.filename = str(path)
        raise
    fsync_path(path.parent)


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read.

    Raises:
        OSError: it exists already, or cannot be written.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see either the previous content or all of `content`."""
    temp_path = path.with_name(f".{path.name}.partial")
    if temp_path.is_symlink():  # not created by us
        temp_path.unlink()
    with rename_when_complete(temp_path, path), os.fdopen(open_to_write(temp_path, os.O_TRUNC), "wb") as file:
        file.write(content)


def open_to_write(path: Path, flags: int = 0) -> int:
    """Open a file for writing, and create it if necessary; do not follow a symbolic link.

    Args:
        path: path of the file.
        flags: additional flags: os.O_TRUNC, os.O_APPEND.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        OSError: it cannot be opened, is a symbolic link, or is not a regular file.
    """
    base_flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, base_flags | flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(error.errno, "is a link, which is not followed to write", str(path)) from None
        raise
    return _require_regular(descriptor, path)


def open_to_append(path: Path) -> IO[str]:
    """Open a text file for appending; see `open_to_write`."""
    return os.fdopen(open_to_write(path, os.O_APPEND), "a")


def open_regular(path: Path) -> int:
    """Open a regular file for reading; refuse pipes and devices, which may never end.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return _require_regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)


def _require_regular(descriptor: int, path: Path) -> int:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_regular(path: Path, limit: int = MAX_READ_BYTES) -> bytes:
    """Read a regular file.

    Args:
        path: path of the file.
        limit: maximum size in bytes.

    Raises:
        OSError: it cannot be read, or is larger.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        is_larger = os.fstat(file.fileno()).st_size > limit  # early refusal; files in /proc report size 0
        content = b"" if is_larger else file.read(limit + 1)
    if is_larger or len(content) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", str(path))
    return content
