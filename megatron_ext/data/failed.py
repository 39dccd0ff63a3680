"""Record of shards that failed while a run read them, so that the next start verifies them completely.

A start of a run does not read all data again. It trusts a local file that is unchanged since its verification, and a
remote file of the right size. Neither check detects a disk error or a flipped bit in the remote file. Without a record,
every start would stop at the same shard again.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from data_prep.manifest import Manifest
from megatron_ext.utils.atomic_files import fsync_path
from megatron_ext.utils.errors import UserError

FAILED_FOLDER_NAME = "failed_shards"
"""Folder in the run folder with one file per failed shard. The file name is the record, so ranks may write at once."""


class DamagedShard(UserError):
    """Failure to read a shard: a disk error, or content that does not match the manifest.

    Args:
        where: the damaged file.
        problem: see `UserError`.
        hint: see `UserError`.
        shard: name of the shard's tar in the manifest.
    """

    def __init__(self, where: str, problem: str, hint: str, shard: str) -> None:
        super().__init__(where, problem, hint)
        self.shard = shard

    def __reduce__(self) -> tuple[type[DamagedShard], Any]:
        """Implement pickling, as `UserError` does."""
        return type(self), (self.where, self.problem, self.hint, self.shard)


@contextmanager
def record_failures(folder: Path, manifest: Manifest, *, skip_damaged: bool) -> Iterator[None]:
    """Record a shard that fails within this context, and extend the hint of the error by how to restart the run.

    Args:
        folder: run folder.
        manifest: manifest of the run's data.
        skip_damaged: True if the next start skips damaged training shards (`data.on_damaged`).

    Raises:
        UserError: a shard failed.
    """
    try:
        yield
    except DamagedShard as error:
        try:
            _write_record(folder, error)
        except OSError:  # without a record the next start does not check again, so the message must not announce it
            raise error from None
        training = [entry for entry in manifest.domains if entry.split == "train"]
        is_training = any(error.shard == shard.file for entry in training for shard in entry.shards)
        hint = f"{error.hint}, {_restart_hint(is_training, skip_damaged)}"
        raise UserError(error.where, error.problem, hint) from None


def _restart_hint(is_training: bool, skip_damaged: bool) -> str:
    if not is_training:  # evaluation text is never skipped
        return "then start again with --resume=auto"
    if skip_damaged:
        return "or just start again with --resume=auto: a shard that is still damaged is skipped"
    return "then start again with --resume=auto, or skip the shard with --resume=auto data.on_damaged=skip"


def read_failed(folder: Path) -> frozenset[str]:
    """Return the shards recorded in a run folder, by the name of their tar in the manifest."""
    try:
        return frozenset(unquote(path.name) for path in (folder / FAILED_FOLDER_NAME).iterdir())
    except OSError:
        return frozenset()


def remove_failed_records(folder: Path, keep: Container[str]) -> None:
    """Remove the records of all shards except those in `keep`. Called at the start of a run, after verification.

    Raises:
        OSError: a record cannot be removed.
    """
    for shard in read_failed(folder):
        if shard not in keep:
            _record_path(folder, shard).unlink(missing_ok=True)


def _write_record(folder: Path, error: DamagedShard) -> None:
    path = _record_path(folder, error.shard)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{error.where}: {error.problem}\n", encoding="utf-8")
    fsync_path(path)
    fsync_path(path.parent)
    fsync_path(folder)


def _record_path(folder: Path, shard: str) -> Path:
    return folder / FAILED_FOLDER_NAME / quote(shard, safe="")
