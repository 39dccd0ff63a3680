"""Atomic creation of the destination folder, and checks of what it may replace."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from megatron_ext.checkpoint.disk import is_full, storage_problem
from megatron_ext.run_folder.layout import CHECKPOINTS, CONFIG
from megatron_ext.utils.atomic_files import fsync_path, open_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.temp_dirs import signals_as_exceptions

_MODEL_MARKERS = ("config.json", CHECKPOINTS, "latest_universal")
"""Every folder that a conversion writes contains at least one of these."""

_WRITTEN_PATTERNS = (
    *_MODEL_MARKERS,
    *(CONFIG, "global_step*", "*.safetensors", "model.safetensors.index.json", "*_selectron.py"),
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "__pycache__"),
)
"""Patterns of the files that a conversion writes, and those that transformers may add."""

README = "README.md"
README_MARK = "<!-- written by selectron convert -->"
"""First line of an exported README.md. A file that begins with it may be overwritten."""


def check_destination(source: Path, destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that exists, overlaps the source, or contains files that no conversion writes.

    Args:
        source: folder to read.
        destination: folder to write.
        overwrite: whether an existing model may be replaced.

    Raises:
        UserError: the destination is not allowed.
    """
    source_path, target = source.resolve(), destination.resolve()
    if source_path == target or source_path in target.parents or target in source_path.parents:
        raise UserError("DESTINATION", f"{destination} and SOURCE contain each other", "give another folder")
    if not target.exists():
        return
    if not overwrite:
        raise UserError("DESTINATION", f"{destination} already exists", "give another folder, or add --overwrite")
    if not target.is_dir():
        raise UserError("DESTINATION", f"{destination} is a file, not a model to overwrite", "give another folder")
    names = sorted(path.name for path in target.iterdir())
    foreign = [name for name in names if not _is_conversion_file(target / name)]
    if foreign:
        problem = f"{destination} contains {foreign[0]}, which no conversion writes and overwriting would remove"
        raise UserError("DESTINATION", problem, "move it away, or give another folder")
    if names and not set(names) & set(_MODEL_MARKERS):
        raise UserError("DESTINATION", f"{destination} contains no model to overwrite", "give another folder")


def _is_conversion_file(path: Path) -> bool:
    """Return whether a conversion or transformers writes such a file."""
    if path.name == README:
        with suppress(OSError), os.fdopen(open_regular(path), "rb") as file:
            return file.read(len(README_MARK.encode())) == README_MARK.encode()
    return any(fnmatch(path.name, pattern) for pattern in _WRITTEN_PATTERNS)


def check_space(destination: Path, num_bytes: int) -> None:
    """Check that the disk has enough free space.

    Args:
        destination: folder to write.
        num_bytes: required space in bytes.

    Raises:
        UserError: the free space is too small.
    """
    parent = next(path for path in destination.resolve().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        problem = f"needs {num_bytes / 1e6:,.1f} MB, but {parent} has only {free / 1e6:,.1f} MB free"
        raise UserError("DESTINATION", problem, "free disk space, or give a folder on another disk")


@contextmanager
def atomic_folder(destination: Path) -> Iterator[Path]:
    """Return a context manager that writes a folder atomically.

    On success, a temporary folder replaces the destination. On an exception or a signal that ends the process, the
    temporary folder is removed.

    Yields:
        The temporary folder, next to the destination.

    Raises:
        UserError: writing fails.
    """
    target = destination.resolve()
    partial = target.with_name(f".{target.name}.partial")
    new_parents = [path for path in target.parents if not path.exists()]
    with signals_as_exceptions() as exceptions:
        try:
            if partial.exists():  # left by a killed process
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            yield partial
            _replace(partial, target)
        except BaseException as error:
            problem = os.strerror(errno.ENOSPC) if is_full(target.parent) else storage_problem(error)
            shutil.rmtree(partial, ignore_errors=True)
            for folder in new_parents:
                with suppress(OSError):
                    folder.rmdir()
            if exceptions:  # torch turns an exception during its writing into a storage error
                raise exceptions[0] from None
            if isinstance(error, UserError):
                raise _with_destination_path(error, partial, destination) from error
            if not isinstance(error, Exception) or problem is None:
                raise
            hint = "free disk space, or give a writable folder"
            raise UserError(str(destination), f"cannot be written: {problem}", hint) from error


def _with_destination_path(error: UserError, partial: Path, destination: Path) -> UserError:
    """Return the error with the path of the removed temporary folder replaced by the destination."""
    where, problem, hint = (
        text.replace(str(partial), str(destination)) for text in (error.where, error.problem, error.hint)
    )
    return UserError(where, problem, hint)


def _replace(partial: Path, target: Path) -> None:
    for path in partial.rglob("*"):
        fsync_path(path)
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        if old.exists():  # left by a killed process
            shutil.rmtree(old)
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old)
    else:
        partial.rename(target)
    fsync_path(target.parent)
