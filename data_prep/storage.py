"""Atomic creation of folders: a folder is filled under another name, forced to disk, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.manifest_entries import MANIFEST_NAME
from megatron_ext.utils.atomic_files import fsync_path, read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

PARTIAL_SUFFIX = ".partial"
SETTINGS_NAME = ".begun.json"
"""File inside a `.partial` folder that records the settings of the run that created it."""

WORK_NAME = ".work"
"""Folder inside a `.partial` folder for temporary files, removed when the `.partial` folder is renamed."""

LOCK_NAME = ".lock"
"""File inside a `.partial` folder that its writer keeps locked, which shows whether the writer still runs."""

HASH_BLOCK_BYTES = 2 << 20
"""Number of bytes that are hashed at once. With fewer bytes, threads that share cores are woken too often."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits.

    Raises:
        OSError: the file cannot be opened or read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # doubles the system's read-ahead, so that hashing waits less
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = memoryview(bytearray(max(1, min(HASH_BLOCK_BYTES, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def unfinished_folder(output: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """Context manager that yields a `.partial` folder to fill; `publish` renames it to `output`.

    A `.partial` folder of an interrupted writer is returned unchanged, so that the work can be resumed. After a
    UserError, a folder that this call created is removed. After any other error it is kept.

    Args:
        output: the folder to create.
        settings: values that determine the content, as JSON values. Resuming with other values is an error.

    Raises:
        UserError: `output` exists and is not empty, or its `.partial` folder cannot be resumed.
    """
    partial = create_partial(output)
    with (partial / LOCK_NAME).open("a") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            hint = "wait for it or choose another --output"
            raise UserError(str(partial), "is being written by another `selectron prepare`", hint) from None
        is_new = _record_settings(partial, settings)
        try:
            yield partial
        except UserError:
            if is_new:
                _discard(partial)
            raise


def create_partial(output: Path) -> Path:
    """Return the `.partial` folder of an output, and create it if needed.

    Raises:
        UserError: `output` exists and is not empty, or its `.partial` path exists but was not created by this command.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(str(output), "already exists and is not empty", "choose another --output or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + PARTIAL_SUFFIX)
    with contextlib.suppress(FileExistsError):
        partial.mkdir()
    names = {path.name for path in partial.iterdir()} if partial.is_dir() else {str(partial)}
    if names and not names & {LOCK_NAME, SETTINGS_NAME}:  # an empty folder may come from a writer killed at its start
        raise UserError(str(partial), "exists, but was not created by `selectron prepare`", "move it elsewhere")
    return partial


def publish(partial: Path, output: Path) -> None:
    """Rename a finished `.partial` folder, after removing the work folder.

    A kill at any point leaves a folder that the next run recognises. Before the folder is renamed, it contains a
    manifest and the record of its settings. After that, it still contains the record, which `was_published` removes.
    """
    shutil.rmtree(partial / WORK_NAME, ignore_errors=True)
    _force_folders_to_disk(partial)
    partial.rename(output)
    fsync_path(output.parent)
    _remove_markers(output)


def was_published(output: Path, settings: dict[str, Any]) -> bool:
    """Return True if a run with the same settings was interrupted after `publish` renamed the folder to `output`.

    The lock and the record of settings that the interrupted run left in the folder are then removed.
    """
    record = output / SETTINGS_NAME
    if not (record.is_file() and (output / MANIFEST_NAME).is_file()) or _first_difference(record, settings) is not None:
        return False
    _remove_markers(output)
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager that acquires a file lock, waiting for it if needed.

    A process of a killed `prepare` may still execute a task when the next run reaches this task. The next run waits.
    """
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _record_settings(partial: Path, settings: dict[str, Any]) -> bool:
    """Record the settings in a new folder, or compare them with those of an old one. Return True for a new folder."""
    record = partial / SETTINGS_NAME
    is_new = not record.is_file()
    if is_new:
        if (partial / MANIFEST_NAME).exists():  # earlier versions removed the record before renaming the folder
            hint = f"rename it to {partial.name.removesuffix(PARTIAL_SUFFIX)}, or remove it to start again"
            raise UserError(str(partial), "is complete, but the run was stopped before it was renamed", hint)
        _empty(partial)  # files from before the record was written cannot be resumed
        write_atomically(record, json.dumps(settings).encode())
    elif (name := _first_difference(record, settings)) is not None:
        before, now = _format_value(parse_json(read_regular(record)).get(name)), _format_value(settings.get(name))
        hint = f"give the same value, or remove {partial} to start again"
        raise UserError(str(partial), f"was started with {name} {before}, not {now}", hint)
    (partial / WORK_NAME).mkdir(exist_ok=True)
    return is_new


def _first_difference(record: Path, settings: dict[str, Any]) -> str | None:
    """Return the first name, in sorted order, whose value differs from the recorded one; None if all are equal."""
    before = parse_json(read_regular(record))
    names = sorted(before.keys() | settings.keys())
    return next((name for name in names if before.get(name) != settings.get(name)), None)


def _discard(partial: Path) -> None:
    """Remove a folder with nothing to resume. The record is removed first, so that no run resumes a partial removal."""
    with contextlib.suppress(OSError):
        (partial / SETTINGS_NAME).unlink(missing_ok=True)
        _empty(partial)
        (partial / LOCK_NAME).unlink(missing_ok=True)
        partial.rmdir()


def _empty(partial: Path) -> None:
    for path in partial.iterdir():
        if path.name != LOCK_NAME:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _remove_markers(output: Path) -> None:
    for name in (LOCK_NAME, SETTINGS_NAME):  # in this order: `was_published` relies on the latter
        (output / name).unlink(missing_ok=True)
    fsync_path(output)


def _format_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _force_folders_to_disk(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_path(Path(folder))
