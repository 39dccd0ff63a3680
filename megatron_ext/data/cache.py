"""Local cache of remote prepared data. Shards are copied to disk and verified when they are first used."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import fsspec

from data_prep.manifest import MANIFEST_NAME, ShardEntry, parse_manifest
from megatron_ext.data.failed import DamagedShard
from megatron_ext.utils.atomic_files import force_to_disk, open_to_write, os_reason, write_whole
from megatron_ext.utils.credentials import is_redacted, redacted, without_secrets_of
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import path_within

BLOCK = 4 << 20

LONGEST_MANIFEST = 512 << 20
"""Maximum size of a manifest in bytes. A manifest of 100,000 shards takes about 50 MB."""

LONGEST_TOKENIZER = 512 << 20
"""Maximum size of a tokenizer file in bytes. The limit is needed because the manifest does not contain the size."""

_LONGEST_LOCK = 80
"""Maximum length of a shard name that names its own lock file. A longer name is hashed, as quoting may triple it."""

_AGAIN = "copy it there again or prepare the data again"


class Unreachable(UserError):
    """Failure to check or copy remote data, which does not imply that the data is damaged."""


class ShardCache:
    """Local copy of a remote prepared folder, restricted to the files used so far.

    All processes of a machine may share the cache. If several processes need a shard at once, one copies it and the
    others wait. A file with its final name is complete and had the manifest's sha256 when it was copied. If the cached
    training shards together exceed the limit, the least recently opened shards are removed. A process that has a
    removed shard open can still read it. The disk space of that shard is freed when the process closes it. Each version
    of a manifest has a separate folder, even at the same URL. Several threads may use the cache at once if each works
    on a different shard.

    Args:
        url: fsspec URL of the prepared folder.
        folder: folder of the copies.
        gib: maximum size of the cached training shards in GiB. None: no limit. The shard copied last is never removed.

    Attributes:
        root: the local folder, with manifest and tokenizer.
        manifest: manifest of the data.
        copied: number of files that this process copied.

    Raises:
        UserError: the URL contains no readable prepared data, or the folder cannot be written.
    """

    def __init__(self, url: str, folder: Path, gib: float | None = None) -> None:
        self._url, self._limit = url.rstrip("/"), None if gib is None else int(gib * 2**30)
        self._files, self._base = _file_system(self._url)
        with self._reading(MANIFEST_NAME) as file:
            content = file.read(LONGEST_MANIFEST + 1)
        if len(content) > LONGEST_MANIFEST:
            problem = f"has more than {LONGEST_MANIFEST >> 20} MiB, which is too large for a manifest"
            raise UserError(f"{self._url}/{MANIFEST_NAME}", problem, "give the address of a prepared folder")
        # Validate the manifest before files that it names are fetched, written or removed.
        self.manifest = parse_manifest(content, f"{self._url}/{MANIFEST_NAME}")
        self.root = folder / hashlib.sha256(f"{redacted(self._url)}\n".encode() + content).hexdigest()[:16]
        self.copied = 0
        self._counting, self._listed = threading.Lock(), dict[str, dict[str, Any]]()
        with self._writing():
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(MANIFEST_NAME):
                write_whole(self.root / MANIFEST_NAME, content)
        tokenizer = self.manifest.tokenizer
        with self._locked(tokenizer.file):
            if not self._here(tokenizer.file).exists():
                self._copy(tokenizer.file, LONGEST_TOKENIZER, tokenizer.sha256, tokenizer.file)
        self._evictable = [shard for entry in self.manifest.domains if entry.split == "train" for shard in entry.shards]

    @contextmanager
    def holding(self, shard: ShardEntry) -> Iterator[None]:
        """Keep a shard and its index under `root` within this context. Copy them first if they are missing.

        Raises:
            DamagedShard: a file does not match the manifest.
            Unreachable: a file cannot be read at its URL, or the disk is full.
        """
        with self._locked(shard.file):
            self._bring(shard, again=False)
            yield

    def keep(self, shard: ShardEntry) -> None:
        """Copy a shard that is later read outside `holding`. Valid for evaluation shards, which are never evicted."""
        with self.holding(shard):
            pass

    def renew(self, shard: ShardEntry) -> None:
        """Replace the cached copy of a shard. Call this after a read of the copy or of the original failed.

        Raises:
            UserError: see `check` and `holding`. A file that could not be replaced keeps its previous copy.
        """
        self.check(shard)
        with self._locked(shard.file):
            self._bring(shard, again=True)

    def is_small_for(self, shards: Iterable[ShardEntry]) -> str | None:
        """Return a warning if the total size of shards read in random order exceeds the limit, else None.

        Args:
            shards: training shards of the run. Every sample may come from any shard.
        """
        size = sum(shard.bytes + shard.index_bytes for shard in shards)
        if self._limit is None or size <= self._limit:
            return None
        problem = f"{self._limit / 2**30:.3g} GiB, but the training shards take {size / 2**30:.3g} GiB"
        waiting = f"about {100 - 100 * self._limit // size} % of the samples wait until a whole shard is copied again"
        return f"data.cache_gib: {problem}: {waiting}; increase it, or remove the limit"

    def check(self, shard: ShardEntry) -> None:
        """Check that a shard and its index exist at their URL, with the sizes in the manifest.

        Raises:
            UserError: a file is missing or has another size. The message names the file.
            Unreachable: the URL cannot be accessed.
        """
        for name, size, _ in _files_of(shard):
            try:
                found = self._size(name)
            except FileNotFoundError:
                raise UserError(f"{self._url}/{name}", "is missing", _AGAIN) from None
            except OSError as error:
                raise self._unreadable(name, error) from None
            if found != size:
                raise UserError(f"{self._url}/{name}", f"has {found} bytes, expected {size}", _AGAIN)

    def _size(self, name: str) -> int | None:
        """Return the size of a remote file in bytes.

        The size comes from a listing of the file's folder, because one request lists about a thousand files. If the
        listing has no size for the file, a separate request is made.
        """
        folder = name.rpartition("/")[0]
        if folder not in self._listed:
            self._listed[folder] = self._list(folder)
        listed = self._listed[folder].get(f"{self._base}/{name}", {}).get("size")
        return self._files.size(f"{self._base}/{name}") if listed is None else listed

    def _list(self, folder: str) -> dict[str, Any]:
        """Return fsspec's information on the files below a remote folder, by full path; empty if listing fails."""
        try:
            found = self._files.find(f"{self._base}/{folder}".rstrip("/"), detail=True)
        except Exception:  # the type of error depends on the file system, and some file systems cannot list
            return {}
        return found if isinstance(found, dict) else {}

    def _bring(self, shard: ShardEntry, *, again: bool) -> None:
        """Copy the missing files of a shard, or all its files if `again` is set. The caller holds the shard's lock."""
        copied = False
        for name, size, sha256 in _files_of(shard):
            path = self._here(name)
            if again or not path.is_file() or path.stat().st_size != size:
                self._copy(name, size, sha256, shard.file)
                copied = True
        os.utime(self.root / shard.file)
        if copied and self._limit is not None:
            self._evict(self._limit)

    def _here(self, name: str) -> Path:
        """Return the cache path of a file named in the manifest. The path never leaves the cache, even by a symlink."""
        return path_within(self.root, name, f"{self._url}/{MANIFEST_NAME}")

    def _copy(self, name: str, most: int, sha256: str, shard: str) -> None:
        """Copy a remote file of at most `most` bytes atomically. The caller holds the lock of `shard`."""
        path = self._here(name)
        beside, digest, copied = path.with_name(f".{path.name}.partial"), hashlib.sha256(), 0
        try:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                file = os.fdopen(open_to_write(beside, os.O_TRUNC), "wb")
            with file as target, self._reading(name) as source:
                while block := self._block(source, name):
                    digest.update(block)
                    copied += len(block)
                    if copied > most:  # the remote file may be endless
                        raise DamagedShard(f"{self._url}/{name}", f"has more than {most} bytes", _AGAIN, shard)
                    with self._writing():
                        target.write(block)
            if digest.hexdigest() != sha256:
                problem = f"sha256 differs: expected {sha256}, found {digest.hexdigest()}"
                raise DamagedShard(f"{self._url}/{name}", problem, _AGAIN, shard)
            with self._writing():
                force_to_disk(beside)
                beside.replace(path)
        finally:
            with suppress(OSError):  # the name may be too long to exist
                beside.unlink(missing_ok=True)
        with self._counting:
            self.copied += 1

    def _evict(self, limit: int) -> None:
        """Remove the least recently opened training shards until the rest takes at most `limit` bytes.

        Shards that a process is opening are skipped.
        """
        with self._locked(".locks"):  # not a valid shard name
            there = [shard for shard in self._evictable if self._here(shard.file).exists()]
            used = sum(shard.bytes + shard.index_bytes for shard in there)
            for shard in sorted(there, key=lambda entry: (self.root / entry.file).stat().st_mtime_ns):
                if used <= limit:
                    return
                with self._locked(shard.file, wait=False) as got:
                    if got:
                        for name, _, _ in _files_of(shard):
                            self._here(name).unlink(missing_ok=True)
                        used -= shard.bytes + shard.index_bytes

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock `name` within this context, among the processes of this machine.

        Yields True, or False if `wait` is off and another process has the lock.
        """
        locks = self.root / ".locks"
        short = (
            quote(name, safe="")
            if name.isascii() and len(name) <= _LONGEST_LOCK
            else hashlib.sha256(name.encode()).hexdigest()
        )
        with self._writing():
            locks.mkdir(exist_ok=True)
            file = os.fdopen(open_to_write(locks / short), "w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True

    @contextmanager
    def _reading(self, name: str) -> Iterator[Any]:
        try:
            file = self._files.open(f"{self._base}/{name}", "rb")
        except OSError as error:
            raise self._unreadable(name, error) from None
        with file:
            yield file

    def _block(self, file: IO[bytes], name: str) -> bytes:
        try:
            return file.read(BLOCK)
        except OSError as error:
            raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: OSError) -> Unreachable:
        reason = os_reason(error)
        reason = without_secrets_of(self._url, reason)
        return Unreachable(f"{self._url}/{name}", f"cannot be read ({reason})", _AGAIN)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self.root} cannot be written ({os_reason(error)})"
            hint = "free disk space, choose another folder, or lower data.cache_gib"
            raise Unreachable("data.cache_dir", problem, hint) from None


def _files_of(shard: ShardEntry) -> tuple[tuple[str, int, str], tuple[str, int, str]]:
    """Return (name, bytes, sha256) of index and tar. The tar is copied last, so its presence implies the index."""
    return (shard.index, shard.index_bytes, shard.index_sha256), (shard.file, shard.bytes, shard.sha256)


def _file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the URL's path in that file system."""
    if is_redacted(url):
        problem = f"{url} was saved without its credentials"
        hint = "give the URL with credentials, or provide them in fsspec's environment variables or files"
        raise UserError("data.path", problem, hint)
    try:
        files, base = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        problem = f"{url} cannot be read ({without_secrets_of(url, ' '.join(str(error).split()))})"
        hint = "give an address that fsspec supports, or install the missing library"
        raise UserError("data.path", problem, hint) from None
    return files, str(base).rstrip("/")
