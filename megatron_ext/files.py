"""Files that are either whole or absent: written beside, forced to disk, then renamed; and what is no file here."""

from __future__ import annotations

import os
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


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees either what was there before or all of `content`."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_bytes(content)
        force_to_disk(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    force_to_disk(path.parent)
