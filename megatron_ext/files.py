"""Files that are either whole or absent: written beside, forced to disk, then renamed; and what is no file here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_url(path: str) -> bool:
    """Whether a name leads elsewhere, s3://bucket/folder, and not to a path of this machine."""
    return "://" in path


def force_to_disk(path: Path) -> None:
    """Flush a file or a folder's entries to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def renamed_when_whole(beside: Path, path: Path) -> Iterator[None]:
    """Within it `beside` is written; then it is forced to disk and takes the name `path`. An error removes it."""
    try:
        yield
        force_to_disk(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    force_to_disk(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees either what was there before or all of `content`."""
    beside = path.with_name(f".{path.name}.partial")
    with renamed_when_whole(beside, path):
        beside.write_bytes(content)
