"""Checks of prepared data before a run begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_prep.manifest import Manifest, ShardEntry, VerifyMode, verify_shard, verify_tokenizer
from megatron_ext.data.cache import Unreachable
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError

THREADS = min(8, 4 * len(os.sched_getaffinity(0)))
"""Number of files hashed concurrently. With four threads per core, some threads hash while others wait for the disk."""

Check = Callable[[ShardEntry], None]
"""Check of one shard. Raises a `UserError` that describes the problem."""


def verify_shards(
    root: Path,
    manifest: Manifest,
    splits: Iterable[str] | None = None,
    domains: Iterable[str] | None = None,
    mode: VerifyMode = "sha256",
    rank: int = 0,
    world_size: int = 1,
    check: Check | None = None,
    threads: int = THREADS,
) -> int:
    """Check this rank's share of the shards and their indexes. Each shard is checked by exactly one rank.

    Args:
        root: folder of the manifest.
        manifest: manifest of the folder.
        splits: splits to check. None: all.
        domains: domains to check, in the long or short form. None: all.
        mode: `sha256` reads whole files, `size` only compares sizes.
        rank: rank among the checking processes.
        world_size: number of checking processes.
        check: check of one shard. None: the check that `mode` selects.
        threads: shards checked concurrently.

    Returns:
        The number of shards that this rank checked.

    Raises:
        UserError: a shard is missing, truncated or altered (the message names the file), or a split or domain is not in
            the manifest.
    """
    shards = _share(manifest, splits, domains, rank, world_size)
    with _check_errors(check or partial(check_here, root, mode), shards, threads) as errors:
        for error in errors:
            if error is not None:
                raise error
    return len(shards)


@dataclass(frozen=True)
class Damage:
    """Shard that is missing, unreadable or altered.

    Attributes:
        shard: name of the shard's tar in the manifest.
        tokens: number of tokens in the shard.
        problem: the damaged file and what is wrong with it.
    """

    shard: str
    tokens: int
    problem: str


def find_damage(
    root: Path,
    manifest: Manifest,
    split: str,
    domains: Iterable[str],
    mode: VerifyMode = "sha256",
    rank: int = 0,
    world_size: int = 1,
    check: Check | None = None,
    threads: int = THREADS,
) -> list[Damage]:
    """Check as `verify_shards` does, but continue after errors and return all damaged shards of this rank's share.

    Raises:
        UserError: a split or domain is not in the manifest.
        Unreachable: remote data cannot be reached, so that damage cannot be determined.
    """
    shards, found = _share(manifest, [split], domains, rank, world_size), []
    with _check_errors(check or partial(check_here, root, mode), shards, threads) as errors:
        for shard, error in zip(shards, errors, strict=True):
            if isinstance(error, Unreachable):
                raise error
            if error is not None:
                found.append(Damage(shard.file, shard.tokens, f"{error.where} {error.problem}"))
    return found


@contextmanager
def _check_errors(check: Check, shards: list[ShardEntry], threads: int) -> Iterator[Iterator[UserError | None]]:
    """Yield an iterator over the error of each shard, in order. On exit, checks that have not begun are cancelled."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool.map(partial(_check_error, check), shards)
    finally:
        pool.shutdown(cancel_futures=True)


def _check_error(check: Check, shard: ShardEntry) -> UserError | None:
    try:
        check(shard)
    except UserError as error:
        return error
    return None


def check_here(root: Path, mode: VerifyMode, shard: ShardEntry) -> None:
    """Check a shard and its index in a local folder.

    Raises:
        UserError: a file is missing, truncated, altered or cannot be read. The message names the file.
    """
    try:
        verify_shard(root, shard, mode)
    except OSError as error:  # a read error in the middle of a file does not name the file
        problem = f"or its index cannot be read ({os_error_reason(error)})"
        raise UserError(str(root / shard.file), problem, "copy it again or prepare the data again") from None


def _share(
    manifest: Manifest, splits: Iterable[str] | None, domains: Iterable[str] | None, rank: int, world_size: int
) -> list[ShardEntry]:
    """Return every `world_size`-th shard of the splits and domains."""
    names = None if domains is None else list(domains)
    selected_splits: list[str | None] = [None] if splits is None else [*splits]
    entries = [entry for split in selected_splits for entry in manifest.select(split, names)]
    return [shard for entry in entries for shard in entry.shards][rank::world_size]


def check_tokenizer(root: Path, manifest: Manifest, tokenizer_path: Path | None = None) -> Path:
    """Check by sha256 that a tokenizer file is the one that the data was prepared with.

    Args:
        root: folder of the manifest.
        manifest: manifest of the folder.
        tokenizer_path: tokenizer file of the run. None: the tokenizer beside the manifest.

    Returns:
        The tokenizer file to use.

    Raises:
        UserError: the file is missing or its sha256 differs. The message names the file and the manifest.
    """
    return verify_tokenizer(root, manifest, tokenizer_path)
