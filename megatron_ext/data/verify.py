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
from megatron_ext.errors import UserError
from megatron_ext.files import os_reason

THREADS = min(8, 4 * len(os.sched_getaffinity(0)))
"""Files hashed at once: of four threads to a core one hashes while others wait for the disk, so that neither idles."""

Check = Callable[[ShardEntry], None]
"""Raises a `UserError` that names what is wrong with a shard."""


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
    """Check this rank's share of the shards and their indexes; the ranks together check every one once.

    Args:
        root: folder of the manifest.
        manifest: what is in it.
        splits: splits to check; None: all.
        domains: domains to check, in the long or short form; None: all.
        mode: `sha256` reads the files whole, `size` compares sizes alone.
        rank: this process among those that check.
        world_size: processes that check.
        check: of one shard, in the place of that by `mode`.
        threads: shards that are checked at once.

    Returns:
        The number of shards that this rank checked.

    Raises:
        UserError: a shard is missing, truncated or altered (the message names the file), or a split or domain is not
            in the manifest.
    """
    shards = _share(manifest, splits, domains, rank, world_size)
    with _errors(check or partial(check_here, root, mode), shards, threads) as errors:
        for error in errors:
            if error is not None:
                raise error
    return len(shards)


@dataclass(frozen=True)
class Damage:
    """A shard that cannot be read, or not as it was made.

    Attributes:
        shard: name of its tar in the manifest.
        tokens: that it held.
        problem: the file at fault, and what is wrong with it.
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
    """Check as `verify_shards` does, but go on, and say what was found.

    Raises:
        UserError: a split or domain is not in the manifest, or a network fails: that says nothing of the shards.
    """
    shards, found = _share(manifest, [split], domains, rank, world_size), []
    with _errors(check or partial(check_here, root, mode), shards, threads) as errors:
        for shard, error in zip(shards, errors, strict=True):
            if isinstance(error, Unreachable):
                raise error
            if error is not None:
                found.append(Damage(shard.file, shard.tokens, f"{error.where} {error.problem}"))
    return found


@contextmanager
def _errors(check: Check, shards: list[ShardEntry], threads: int) -> Iterator[Iterator[UserError | None]]:
    """What is wrong with each shard, in order; those that nobody has begun with are left out when nobody asks on."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool.map(partial(_error, check), shards)
    finally:
        pool.shutdown(cancel_futures=True)


def _error(check: Check, shard: ShardEntry) -> UserError | None:
    try:
        check(shard)
    except UserError as error:
        return error
    return None


def check_here(root: Path, mode: VerifyMode, shard: ShardEntry) -> None:
    """Check a shard and its index in a local folder.

    Raises:
        UserError: a file is missing, truncated, altered or cannot be read; it is named.
    """
    try:
        verify_shard(root, shard, mode)
    except OSError as error:  # a disk that fails in the middle of a file does not say of which
        problem = f"or its index cannot be read ({os_reason(error)})"
        raise UserError(str(root / shard.file), problem, "copy it again or prepare the data again") from None


def _share(
    manifest: Manifest, splits: Iterable[str] | None, domains: Iterable[str] | None, rank: int, world_size: int
) -> list[ShardEntry]:
    """Every `world_size`-th shard of the splits and domains."""
    names = None if domains is None else list(domains)
    wanted: list[str | None] = [None] if splits is None else [*splits]
    chosen = [entry for split in wanted for entry in manifest.select(split, names)]
    return [shard for entry in chosen for shard in entry.shards][rank::world_size]


def check_tokenizer(root: Path, manifest: Manifest, tokenizer_path: Path | None = None) -> Path:
    """Check that a tokenizer.json is the one the data was made with, by its sha256.

    Args:
        root: folder of the manifest.
        manifest: what is in it.
        tokenizer_path: the run's tokenizer; None: the one kept beside the manifest.

    Returns:
        The file to use.

    Raises:
        UserError: it is missing or another one; the message names it and the manifest.
    """
    return verify_tokenizer(root, manifest, tokenizer_path)
