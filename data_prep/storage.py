"""Writing that is either whole or absent: beside the target first, forced to disk, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron_ext.errors import UserError
from megatron_ext.files import force_to_disk

LOCK_NAME = ".lock"
"""File inside a `.partial` folder that its writer holds locked: tells a running writer from a killed one."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """Give a `.partial` folder to fill; on success it becomes `output`, on any exception it is removed.

    A `.partial` folder that a killed writer left is removed and begun again; one that is still being written, or that
    this function did not make, is refused.

    Raises:
        UserError: `output` is there and not empty, or its `.partial` folder cannot be claimed.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(str(output), "is already there and not empty", "choose another --output or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_claim(partial))
        try:
            yield partial
            (partial / LOCK_NAME).unlink()
            _force_folders_to_disk(partial)
            partial.rename(output)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        force_to_disk(output.parent)


def _claim(partial: Path) -> IO[str]:
    if partial.exists():
        _remove_abandoned(partial)
    partial.mkdir()
    lock = (partial / LOCK_NAME).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _remove_abandoned(partial: Path) -> None:
    lock_path = partial / LOCK_NAME
    if not lock_path.is_file():
        raise UserError(str(partial), "is in the way and was not left by `selectron prepare`", "move it elsewhere")
    with lock_path.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mend = "wait for it or choose another --output"
            raise UserError(str(partial), "is being written by another `selectron prepare`", mend) from None
        shutil.rmtree(partial)


def _force_folders_to_disk(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        force_to_disk(Path(folder))
