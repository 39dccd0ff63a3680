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
from megatron_ext.utils.atomic_files import force_to_disk
from megatron_ext.utils.errors import UserError

NOTES = "failed_shards"
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
def noting(folder: Path, manifest: Manifest, *, skips: bool) -> Iterator[None]:
    """Record a shard that fails within this context, and extend the error message by what the next start will do.

    Args:
        folder: run folder.
        manifest: manifest of the run's data.
        skips: True if the next start may leave out training text.

    Raises:
        UserError: a shard failed.
    """
    try:
        yield
    except DamagedShard as error:
        try:
            _note(folder, error)
        except OSError:  # without a record the next start does not check again, so the message must not announce it
            raise error from None
        training = [entry for entry in manifest.domains if entry.split == "train"]
        trained_on = any(error.shard == shard.file for entry in training for shard in entry.shards)
        raise UserError(error.where, error.problem, f"{error.hint}, {_what_next(trained_on, skips)}") from None


def _what_next(trained_on: bool, skips: bool) -> str:
    if not trained_on:  # evaluation text is never skipped
        return "then start again with --resume=auto"
    if skips:
        return "or just start again with --resume=auto: a shard that is still damaged is skipped"
    return "then start again with --resume=auto, or skip the shard with --resume=auto data.on_damaged=skip"


def read_failed(folder: Path) -> frozenset[str]:
    """Return the shards recorded in a run folder, by the name of their tar in the manifest."""
    try:
        return frozenset(unquote(note.name) for note in (folder / NOTES).iterdir())
    except OSError:
        return frozenset()


def forget_failed(folder: Path, but: Container[str]) -> None:
    """Remove the records of all shards except those in `but`. Called at the start of a run, after verification.

    Raises:
        OSError: a record cannot be removed.
    """
    for shard in read_failed(folder):
        if shard not in but:
            _path(folder, shard).unlink(missing_ok=True)


def _note(folder: Path, error: DamagedShard) -> None:
    path = _path(folder, error.shard)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{error.where}: {error.problem}\n", encoding="utf-8")
    force_to_disk(path)
    force_to_disk(path.parent)
    force_to_disk(folder)


def _path(folder: Path, shard: str) -> Path:
    return folder / NOTES / quote(shard, safe="")
