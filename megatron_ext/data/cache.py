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
from megatron_ext.utils.atomic_files import fsync_path, open_to_write, os_error_reason, write_atomically
from megatron_ext.utils.credentials import is_redacted, redact, remove_secrets
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import path_within

BLOCK_BYTES = 4 << 20

MAX_MANIFEST_BYTES = 512 << 20
"""Maximum size of a manifest in bytes. A manifest of 100,000 shards takes about 50 MB."""

MAX_TOKENIZER_BYTES = 512 << 20
"""Maximum size of a tokenizer file in bytes. The limit is needed because the manifest does not contain the size."""

_MAX_LOCK_NAME_LENGTH = 80
"""Maximum length of a shard name that names its own lock file. A longer name is hashed, as quoting may triple it."""

_COPY_HINT = "copy it there again or prepare the data again"


class Unreachable(UserError):
    """Failure to check or copy remote data. The data itself may be undamaged."""


class ShardCache:
    """Local copy of the files of a remote prepared folder that were used so far.

    All processes of a machine may share the cache. If several processes need a shard at once, one copies it and the
    others wait. A file with its final name is complete and had the manifest's sha256 when it was copied. If the cached
    training shards together exceed the limit, the least recently opened shards are removed. A process that has a
    removed shard open can still read it. The disk space of that shard is freed when the process closes it. Each version
    of a manifest has a separate folder, even at the same URL. Several threads may use the cache at once if each works
    on a different shard.

    Args:
        url: fsspec URL of the prepared folder.
        folder: folder of the copies.
        max_gib: maximum size of the cached training shards in GiB. None: no limit. The shard copied last is never
            removed.

    Attributes:
        root: the local folder, with manifest and tokenizer.
        manifest: manifest of the data.
        num_copied: number of files that this process copied.

    Raises:
        UserError: the URL contains no readable prepared data, or the folder cannot be written.
    """

    def __init__(self, url: str, folder: Path, max_gib: float | None = None) -> None:
        self._url, self._max_bytes = url.rstrip("/"), None if max_gib is None else int(max_gib * 2**30)
        self._file_system, self._base_path = _open_file_system(self._url)
        with self._open_remote(MANIFEST_NAME) as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            problem = f"has more than {MAX_MANIFEST_BYTES >> 20} MiB, which is too large for a manifest"
            raise UserError(f"{self._url}/{MANIFEST_NAME}", problem, "give the address of a prepared folder")
        # Validate the manifest before files that it names are fetched, written or removed.
        self.manifest = parse_manifest(content, f"{self._url}/{MANIFEST_NAME}")
        self.root = folder / hashlib.sha256(f"{redact(self._url)}\n".encode() + content).hexdigest()[:16]
        self.num_copied = 0
        self._copied_lock, self._listings = threading.Lock(), dict[str, dict[str, Any]]()
        with self._wrap_write_errors():
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(MANIFEST_NAME):
                write_atomically(self.root / MANIFEST_NAME, content)
        tokenizer = self.manifest.tokenizer
        with self._locked(tokenizer.file):
            if not self._local_path(tokenizer.file).exists():
                self._copy(tokenizer.file, MAX_TOKENIZER_BYTES, tokenizer.sha256, tokenizer.file)
        self._evictable = [shard for entry in self.manifest.domains if entry.split == "train" for shard in entry.shards]

    @contextmanager
    def pin_shard(self, shard: ShardEntry) -> Iterator[None]:
        """Protect a shard and its index from eviction within this context. Copy them first if they are missing.

        Raises:
            DamagedShard: a file does not match the manifest.
            Unreachable: a file cannot be read at its URL, or the disk is full.
        """
        with self._locked(shard.file):
            self._ensure_local(shard, overwrite=False)
            yield

    def fetch(self, shard: ShardEntry) -> None:
        """Copy a shard to the cache if it is missing. Use this for evaluation shards, which are never evicted.

        Raises:
            DamagedShard: see `pin_shard`.
            Unreachable: see `pin_shard`.
        """
        with self.pin_shard(shard):
            pass

    def refetch(self, shard: ShardEntry) -> None:
        """Replace the cached copy of a shard. Call this after a read of the copy or of the original failed.

        Raises:
            UserError: see `check` and `pin_shard`. If a file cannot be replaced, its previous copy remains.
        """
        self.check(shard)
        with self._locked(shard.file):
            self._ensure_local(shard, overwrite=True)

    def size_warning(self, shards: Iterable[ShardEntry]) -> str | None:
        """Return a warning if the total size of shards read in random order exceeds the limit, else None.

        Args:
            shards: training shards of the run. Every sample may come from any shard.
        """
        size = sum(shard.bytes + shard.index_bytes for shard in shards)
        if self._max_bytes is None or size <= self._max_bytes:
            return None
        problem = f"{self._max_bytes / 2**30:.3g} GiB, but the training shards take {size / 2**30:.3g} GiB"
        percent = 100 - 100 * self._max_bytes // size
        effect = f"about {percent} % of the samples wait until a whole shard is copied again"
        return f"data.cache_gib: {problem}: {effect}; increase it, or remove the limit"

    def check(self, shard: ShardEntry) -> None:
        """Check that a shard and its index exist at their URL, with the sizes in the manifest.

        Raises:
            UserError: a file is missing or has another size. The message names the file.
            Unreachable: the URL cannot be accessed.
        """
        for name, size, _ in _shard_files(shard):
            try:
                actual = self._size(name)
            except FileNotFoundError:
                raise UserError(f"{self._url}/{name}", "is missing", _COPY_HINT) from None
            except OSError as error:
                raise self._unreadable(name, error) from None
            if actual != size:
                raise UserError(f"{self._url}/{name}", f"has {actual} bytes, expected {size}", _COPY_HINT)

    def _size(self, name: str) -> int | None:
        """Return the size of a remote file in bytes.

        The size comes from a listing of the file's folder, because one request lists about a thousand files. If the
        listing has no size for the file, a separate request is made.
        """
        folder = name.rpartition("/")[0]
        if folder not in self._listings:
            self._listings[folder] = self._list(folder)
        size = self._listings[folder].get(f"{self._base_path}/{name}", {}).get("size")
        return self._file_system.size(f"{self._base_path}/{name}") if size is None else size

    def _list(self, folder: str) -> dict[str, Any]:
        """Return fsspec's information on the files below a remote folder, by full path; empty if listing fails."""
        try:
            listing = self._file_system.find(f"{self._base_path}/{folder}".rstrip("/"), detail=True)
        except Exception:  # the type of error depends on the file system, and some file systems cannot list
            return {}
        return listing if isinstance(listing, dict) else {}

    def _ensure_local(self, shard: ShardEntry, *, overwrite: bool) -> None:
        """Copy the missing files of a shard, or all its files if `overwrite` is set. The caller holds its lock."""
        has_copied = False
        for name, size, sha256 in _shard_files(shard):
            path = self._local_path(name)
            if overwrite or not path.is_file() or path.stat().st_size != size:
                self._copy(name, size, sha256, shard.file)
                has_copied = True
        os.utime(self.root / shard.file)
        if has_copied and self._max_bytes is not None:
            self._evict(self._max_bytes)

    def _local_path(self, name: str) -> Path:
        """Return the cache path of a file named in the manifest. The path never leaves the cache, even by a symlink."""
        return path_within(self.root, name, f"{self._url}/{MANIFEST_NAME}")

    def _copy(self, name: str, max_bytes: int, sha256: str, shard: str) -> None:
        """Copy a remote file of at most `max_bytes` bytes atomically. The caller holds the lock of `shard`."""
        path = self._local_path(name)
        partial_path, digest, num_bytes = path.with_name(f".{path.name}.partial"), hashlib.sha256(), 0
        try:
            with self._wrap_write_errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                file = os.fdopen(open_to_write(partial_path, os.O_TRUNC), "wb")
            with file as target, self._open_remote(name) as source:
                while block := self._read_block(source, name):
                    digest.update(block)
                    num_bytes += len(block)
                    if num_bytes > max_bytes:  # the remote file may be endless
                        raise DamagedShard(f"{self._url}/{name}", f"has more than {max_bytes} bytes", _COPY_HINT, shard)
                    with self._wrap_write_errors():
                        target.write(block)
            if digest.hexdigest() != sha256:
                problem = f"sha256 differs: expected {sha256}, found {digest.hexdigest()}"
                raise DamagedShard(f"{self._url}/{name}", problem, _COPY_HINT, shard)
            with self._wrap_write_errors():
                fsync_path(partial_path)
                partial_path.replace(path)
        finally:
            with suppress(OSError):  # the name may be too long to exist
                partial_path.unlink(missing_ok=True)
        with self._copied_lock:
            self.num_copied += 1

    def _evict(self, max_bytes: int) -> None:
        """Remove the least recently opened training shards until the rest takes at most `max_bytes` bytes.

        Shards that a process is opening are skipped.
        """
        with self._locked(".locks"):  # not a valid shard name
            cached = [shard for shard in self._evictable if self._local_path(shard.file).exists()]
            used = sum(shard.bytes + shard.index_bytes for shard in cached)
            for shard in sorted(cached, key=lambda entry: (self.root / entry.file).stat().st_mtime_ns):
                if used <= max_bytes:
                    return
                with self._locked(shard.file, wait=False) as acquired:
                    if acquired:
                        for name, _, _ in _shard_files(shard):
                            self._local_path(name).unlink(missing_ok=True)
                        used -= shard.bytes + shard.index_bytes

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock `name` within this context, among the processes of this machine.

        Yields True, or False if `wait` is off and another process has the lock.
        """
        folder = self.root / ".locks"
        lock_name = (
            quote(name, safe="")
            if name.isascii() and len(name) <= _MAX_LOCK_NAME_LENGTH
            else hashlib.sha256(name.encode()).hexdigest()
        )
        with self._wrap_write_errors():
            folder.mkdir(exist_ok=True)
            file = os.fdopen(open_to_write(folder / lock_name), "w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True

    @contextmanager
    def _open_remote(self, name: str) -> Iterator[Any]:
        try:
            file = self._file_system.open(f"{self._base_path}/{name}", "rb")
        except OSError as error:
            raise self._unreadable(name, error) from None
        with file:
            yield file

    def _read_block(self, file: IO[bytes], name: str) -> bytes:
        try:
            return file.read(BLOCK_BYTES)
        except OSError as error:
            raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: OSError) -> Unreachable:
        reason = os_error_reason(error)
        reason = remove_secrets(self._url, reason)
        return Unreachable(f"{self._url}/{name}", f"cannot be read ({reason})", _COPY_HINT)

    @contextmanager
    def _wrap_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self.root} cannot be written ({os_error_reason(error)})"
            hint = "free disk space, choose another folder, or lower data.cache_gib"
            raise Unreachable("data.cache_dir", problem, hint) from None


def _shard_files(shard: ShardEntry) -> tuple[tuple[str, int, str], tuple[str, int, str]]:
    """Return (name, bytes, sha256) of the index and the tar, in the order in which they are copied."""
    return (shard.index, shard.index_bytes, shard.index_sha256), (shard.file, shard.bytes, shard.sha256)


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the URL's path in that file system."""
    if is_redacted(url):
        problem = f"{url} was saved without its credentials"
        hint = "give the URL with credentials, or provide them in fsspec's environment variables or files"
        raise UserError("data.path", problem, hint)
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        problem = f"{url} cannot be read ({remove_secrets(url, ' '.join(str(error).split()))})"
        hint = "give an address that fsspec supports, or install the missing library"
        raise UserError("data.path", problem, hint) from None
    return file_system, str(path).rstrip("/")
