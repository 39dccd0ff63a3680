"""Prepared data that lies elsewhere: shards are copied to a local disk when they are first used, and checked there."""

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
from megatron_ext.credentials import is_redacted, redacted, without_secrets_of
from megatron_ext.data.failed import DamagedShard
from megatron_ext.errors import UserError
from megatron_ext.files import force_to_disk, open_to_write, os_reason, write_whole
from megatron_ext.paths import path_within

BLOCK = 4 << 20

LONGEST_MANIFEST = 512 << 20
"""Bytes of a manifest that are read; one with 100,000 shards has some 50 MB."""

LONGEST_TOKENIZER = 512 << 20
"""Bytes of a tokenizer's file that are copied: its manifest does not tell its size."""

_LONGEST_LOCK = 80
"""Characters of a name that a lock's file is called by: each may become three, or more where it is not ASCII."""

_AGAIN = "copy it there again or prepare the data again"


class Unreachable(UserError):
    """What lies at an address could not be looked at, or not be copied here; whether it is whole is not known."""


class ShardCache:
    """A local folder that looks like the remote one, as far as it has been used.

    Any number of processes of a machine may share it; of those that want a shard at the same time one copies it, and
    the others wait. What is found under its name is whole and had the manifest's sha256 when it came. Shards of
    training text that were not opened for longest are removed once all of them together are above the limit; a process
    that has one open can still read it, and keeps its room on the disk until then. Another manifest at the same address
    is another folder. Several threads may use it, each for a shard of its own.

    Args:
        url: of the prepared folder, as fsspec takes it.
        folder: where copies are kept.
        gib: of training text on the disk, in GiB; None: without a limit. The shard just copied is never removed.

    Attributes:
        root: the local folder, with manifest and tokenizer.
        manifest: of the data.
        copied: files that this process copied.

    Raises:
        UserError: nothing that is prepared data can be read there, or the folder cannot be written.
    """

    def __init__(self, url: str, folder: Path, gib: float | None = None) -> None:
        self._url, self._limit = url.rstrip("/"), None if gib is None else int(gib * 2**30)
        self._files, self._base = _file_system(self._url)
        with self._reading(MANIFEST_NAME) as file:
            content = file.read(LONGEST_MANIFEST + 1)
        if len(content) > LONGEST_MANIFEST:
            problem = f"has more than {LONGEST_MANIFEST >> 20} MiB, as no manifest has"
            raise UserError(f"{self._url}/{MANIFEST_NAME}", problem, "give the address of a prepared folder")
        # Checked whole before anything that it names is fetched, written or removed.
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
        """While inside, the shard and its index lie under `root`; they are copied there if they did not.

        Raises:
            DamagedShard: a file is not what the manifest says.
            Unreachable: one cannot be read at its address; or the disk is full.
        """
        with self._locked(shard.file):
            self._bring(shard, again=False)
            yield

    def keep(self, shard: ShardEntry) -> None:
        """Copy a shard that is read without `holding`; only those of training text are ever removed."""
        with self.holding(shard):
            pass

    def renew(self, shard: ShardEntry) -> None:
        """Copy a shard again whatever is here: the copy, or what lies at the address, failed when it was read.

        Raises:
            UserError: see `check` and `holding`. A copy that was here stays then.
        """
        self.check(shard)
        with self._locked(shard.file):
            self._bring(shard, again=True)

    def is_small_for(self, shards: Iterable[ShardEntry]) -> str | None:
        """What is wrong with the limit, where shards that are read in any order do not find room below it together.

        Args:
            shards: that a run reads; each sample may be of any.
        """
        size = sum(shard.bytes + shard.index_bytes for shard in shards)
        if self._limit is None or size <= self._limit:
            return None
        problem = f"{self._limit / 2**30:.3g} GiB, and the shards to train on have {size / 2**30:.3g} GiB"
        waiting = f"of 100 samples about {100 - 100 * self._limit // size} wait until a whole shard is copied again"
        return f"data.cache_gib: {problem}: {waiting}; give more than that, or leave it out"

    def check(self, shard: ShardEntry) -> None:
        """See that a shard and its index are at their address, with the sizes that the manifest says.

        Raises:
            UserError: one is not; it is named.
            Unreachable: nobody answers.
        """
        for name, size, _ in _files_of(shard):
            try:
                found = self._size(name)
            except FileNotFoundError:
                raise UserError(f"{self._url}/{name}", "is missing", _AGAIN) from None
            except OSError as error:
                raise self._unreadable(name, error) from None
            if found != size:
                raise UserError(f"{self._url}/{name}", f"is of {found} bytes, expected {size}", _AGAIN)

    def _size(self, name: str) -> int | None:
        """Bytes of a file at the address: as the list of its folder says; where that does not, it is asked for alone.

        Lists come a thousand files a request or so, and shards are many.
        """
        folder = name.rpartition("/")[0]
        if folder not in self._listed:
            self._listed[folder] = self._list(folder)
        listed = self._listed[folder].get(f"{self._base}/{name}", {}).get("size")
        return self._files.size(f"{self._base}/{name}") if listed is None else listed

    def _list(self, folder: str) -> dict[str, Any]:
        """What lies in a folder at the address, by its whole name; nothing where that cannot be had."""
        try:
            found = self._files.find(f"{self._base}/{folder}".rstrip("/"), detail=True)
        except Exception:  # each kind of address has errors of its own, and some give files but no lists
            return {}
        return found if isinstance(found, dict) else {}

    def _bring(self, shard: ShardEntry, *, again: bool) -> None:
        """Copy what is not here of a shard, or all of it again; its lock is held."""
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
        """Where a file of the manifest lies in the cache; never outside it, not even by a link."""
        return path_within(self.root, name, f"{self._url}/{MANIFEST_NAME}")

    def _copy(self, name: str, most: int, sha256: str, shard: str) -> None:
        """Copy a file of at most so many bytes, of a shard say, whole or not at all; the lock is held."""
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
                    if copied > most:  # the address may give bytes without end
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
            with suppress(OSError):  # its name may be too long for it to be there
                beside.unlink(missing_ok=True)
        with self._counting:
            self.copied += 1

    def _evict(self, limit: int) -> None:
        """Remove the shards that were not opened for longest, but those that a process is just opening."""
        with self._locked(".locks"):  # no shard may be called so
            there = [shard for shard in self._evictable if self._here(shard.file).exists()]
            used = sum(shard.bytes + shard.index_bytes for shard in there)
            for shard in sorted(there, key=lambda one: (self.root / one.file).stat().st_mtime_ns):
                if used <= limit:
                    return
                with self._locked(shard.file, wait=False) as got:
                    if got:
                        for name, _, _ in _files_of(shard):
                            self._here(name).unlink(missing_ok=True)
                        used -= shard.bytes + shard.index_bytes

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a name's lock among the processes of this machine; without waiting, say whether it was free."""
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
            mend = "make room, choose another or lower data.cache_gib"
            raise Unreachable("data.cache_dir", problem, mend) from None


def _files_of(shard: ShardEntry) -> tuple[tuple[str, int, str], tuple[str, int, str]]:
    """(Name, bytes, sha256) of index and tar; the tar comes last, so that where it is, the index is."""
    return (shard.index, shard.index_bytes, shard.index_sha256), (shard.file, shard.bytes, shard.sha256)


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of an address, and the folder in it."""
    if is_redacted(url):
        problem = f"{url} was saved without its credentials"
        raise UserError("data.path", problem, "give it with them, or without: fsspec reads its environment and files")
    try:
        files, base = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        problem = f"{url} cannot be read ({without_secrets_of(url, ' '.join(str(error).split()))})"
        raise UserError(
            "data.path", problem, "give an address that fsspec knows, or install what it asks for"
        ) from None
    return files, str(base).rstrip("/")
