"""Prepared data that lies elsewhere: shards are copied to a local disk when they are first used, and checked there."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import fsspec

from data_prep.manifest import MANIFEST_NAME, ShardEntry, load_manifest
from megatron_ext.errors import UserError
from megatron_ext.files import force_to_disk, write_whole

BLOCK = 4 << 20
_AGAIN = "copy it there again or prepare the data again"


class Unreachable(UserError):
    """What lies at an address could not be looked at; whether it is whole is not known."""


class ShardCache:
    """A local folder that looks like the remote one, as far as it has been used.

    Any number of processes of a machine may share it; of those that want a shard at the same time one copies it, and
    the others wait. What is found under its name is whole and had the manifest's sha256 when it came. Shards of
    training text that were not opened for longest are removed once all of them together are above the limit; a process
    that has one open can still read it. Another manifest at the same address is another folder.

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
            content = file.read()
        self.root = folder / hashlib.sha256(f"{self._url}\n".encode() + content).hexdigest()[:16]
        self.copied = 0
        with self._writing():
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(MANIFEST_NAME):
                write_whole(self.root / MANIFEST_NAME, content)
        self.manifest = load_manifest(self.root)
        tokenizer = self.manifest.tokenizer
        with self._locked(tokenizer.file):
            if not (self.root / tokenizer.file).exists():
                self._copy(tokenizer.file, tokenizer.sha256)
        self._evictable = [shard for entry in self.manifest.domains if entry.split == "train" for shard in entry.shards]

    @contextmanager
    def holding(self, shard: ShardEntry) -> Iterator[None]:
        """While inside, the shard and its index lie under `root`; they are copied there if they did not.

        Raises:
            UserError: a file cannot be read at its address, or is not what the manifest says; or the disk is full.
        """
        with self._locked(shard.file):
            copied = self.copied
            for name, size, sha256 in _files_of(shard):
                path = self.root / name
                if not path.is_file() or path.stat().st_size != size:
                    self._copy(name, sha256)
            os.utime(self.root / shard.file)
            if self.copied > copied and self._limit is not None:
                self._evict(self._limit)
            yield

    def keep(self, shard: ShardEntry) -> None:
        """Copy a shard that is read without `holding`; only those of training text are ever removed."""
        with self.holding(shard):
            pass

    def check(self, shard: ShardEntry) -> None:
        """See that a shard and its index are at their address, with the sizes that the manifest says.

        Raises:
            UserError: one is not; it is named.
            Unreachable: nobody answers.
        """
        for name, size, _ in _files_of(shard):
            try:
                found = self._files.size(f"{self._base}/{name}")
            except FileNotFoundError:
                raise UserError(f"{self._url}/{name}", "is missing", _AGAIN) from None
            except OSError as error:
                raise self._unreadable(name, error) from None
            if found != size:
                raise UserError(f"{self._url}/{name}", f"is of {found} bytes, expected {size}", _AGAIN)

    def _copy(self, name: str, sha256: str) -> None:
        """Copy a file whole or not at all; its lock is held."""
        path = self.root / name
        beside, digest = path.with_name(f".{path.name}.partial"), hashlib.sha256()
        try:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
            with self._reading(name) as source, beside.open("wb") as target:
                while block := self._block(source, name):
                    digest.update(block)
                    with self._writing():
                        target.write(block)
            if digest.hexdigest() != sha256:
                problem = f"sha256 differs: expected {sha256}, found {digest.hexdigest()}"
                raise UserError(f"{self._url}/{name}", problem, _AGAIN)
            with self._writing():
                force_to_disk(beside)
                beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        self.copied += 1

    def _evict(self, limit: int) -> None:
        """Remove the shards that were not opened for longest, but those that a process is just opening."""
        with self._locked("evict"):
            there = [shard for shard in self._evictable if (self.root / shard.file).exists()]
            used = sum(shard.bytes + shard.index_bytes for shard in there)
            for shard in sorted(there, key=lambda one: (self.root / one.file).stat().st_mtime_ns):
                if used <= limit:
                    return
                with self._locked(shard.file, wait=False) as got:
                    if got:
                        for name, _, _ in _files_of(shard):
                            (self.root / name).unlink(missing_ok=True)
                        used -= shard.bytes + shard.index_bytes

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a name's lock among the processes of this machine; without waiting, say whether it was free."""
        locks = self.root / ".locks"
        locks.mkdir(exist_ok=True)
        with (locks / quote(name, safe="")).open("w") as file:
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
        reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
        return Unreachable(f"{self._url}/{name}", f"cannot be read ({reason})", _AGAIN)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self.root} cannot be written ({error.strerror})"
            raise UserError("data.cache_dir", problem, "make room, choose another or lower data.cache_gib") from None


def _files_of(shard: ShardEntry) -> tuple[tuple[str, int, str], tuple[str, int, str]]:
    """(Name, bytes, sha256) of index and tar; the tar comes last, so that where it is, the index is."""
    return (shard.index, shard.index_bytes, shard.index_sha256), (shard.file, shard.bytes, shard.sha256)


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of an address, and the folder in it."""
    try:
        files, base = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        problem = f"{url} cannot be read ({' '.join(str(error).split())})"
        raise UserError(
            "data.path", problem, "give an address that fsspec knows, or install what it asks for"
        ) from None
    return files, str(base).rstrip("/")
