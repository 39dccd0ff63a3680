"""Shards that failed while a run read them: noted in its folder, so that its next start looks at them whole.

A start does not read all data again: it trusts a file that is as it was when it was compared, and a file of the right
size at an address. A disk that has failed since, or a flipped bit at an address, passes that; without a note every
start would stop at the same shard again.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from data_prep.manifest import Manifest
from megatron_ext.errors import UserError
from megatron_ext.files import force_to_disk

NOTES = "failed_shards"
"""Folder with a file for each: ranks of several machines may write at once, and what counts is the name."""


class DamagedShard(UserError):
    """A shard failed as it was read: the disk did, or it is not as it was made.

    Args:
        where: the file at fault.
        problem: see `UserError`.
        mend: see `UserError`.
        shard: name of the shard's tar in the manifest.
    """

    def __init__(self, where: str, problem: str, mend: str, shard: str) -> None:
        super().__init__(where, problem, mend)
        self.shard = shard

    def __reduce__(self) -> tuple[type[DamagedShard], Any]:
        """See `UserError`."""
        return type(self), (self.where, self.problem, self.mend, self.shard)


@contextmanager
def noting(folder: Path, manifest: Manifest, *, skips: bool) -> Iterator[None]:
    """Note a shard that fails inside, and say with its error what the next start does about it.

    Args:
        folder: of the run.
        manifest: of its data.
        skips: whether the next start may leave training text out.

    Raises:
        UserError: a shard failed.
    """
    try:
        yield
    except DamagedShard as error:
        try:
            _note(folder, error)
        except OSError:  # nothing can be promised
            raise error from None
        training = [entry for entry in manifest.domains if entry.split == "train"]
        trained_on = any(error.shard == shard.file for entry in training for shard in entry.shards)
        raise UserError(error.where, error.problem, f"{error.mend}, {_what_next(trained_on, skips)}") from None


def _what_next(trained_on: bool, skips: bool) -> str:
    if not trained_on:  # results rest on it
        return "then start again with --resume=auto"
    if skips:
        return "or only start again with --resume=auto: if it is still damaged then, the run leaves it out and goes on"
    return "then start again with --resume=auto, or leave it out with --resume=auto data.on_damaged=skip"


def read_failed(folder: Path) -> frozenset[str]:
    """Shards that are noted in a run's folder, by the name of their tar in the manifest."""
    try:
        return frozenset(unquote(note.name) for note in (folder / NOTES).iterdir())
    except OSError:
        return frozenset()


def forget_failed(folder: Path, but: Container[str]) -> None:
    """Remove the notes of shards that a start has found whole: of all that are not in `but`.

    Raises:
        OSError: a note cannot be removed.
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
