"""Input files on local disks and behind fsspec URLs (s3://, gs://, hf://, memory://, ...)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from stat import S_IFBLK, S_IFCHR, S_IFIFO, S_IFMT, S_IFSOCK, S_ISREG
from typing import IO, Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from megatron_ext.utils.atomic_files import is_url
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable

ABSENT_HINT = "give a file, a folder, a URL or `embedded`"

MAX_FILES = 1_000_000
"""Maximum number of input files. Every worker keeps the list of files in memory, at about 700 bytes per file."""


SPECIAL_FILES = {S_IFIFO: "a pipe", S_IFSOCK: "a socket", S_IFCHR: "a device", S_IFBLK: "a device"}


@dataclass(frozen=True)
class InputFile:
    """One file of the input.

    Attributes:
        location: path or URL, as shown in messages.
        parts: components of the path inside the input; only the file name if the input is a single file.
        size: size in bytes.
        stamp: modification time or ETag, which shows whether the file has changed.
        unreadable_reason: reason why the file cannot be read (a broken link, or not a regular file); otherwise empty.
    """

    location: str
    parts: tuple[str, ...]
    size: int
    stamp: str = ""
    unreadable_reason: str = ""

    @property
    def name(self) -> str:
        """File name."""
        return self.parts[-1]

    @property
    def suffix(self) -> str:
        """Last suffix of the name, in lower case."""
        return PurePosixPath(self.name).suffix.lower()

    @property
    def source(self) -> str:
        """Path inside the input, as in ids and manifests, with undecodable bytes of a name as escapes."""
        return printable("/".join(self.parts))

    @property
    def key(self) -> bytes:
        """Path inside the input, as file-system bytes."""
        return os.fsencode("/".join(self.parts))

    @property
    def is_local(self) -> bool:
        """True if the file has a path on this machine."""
        return not is_url(self.location)

    def open(self) -> IO[bytes]:
        """Open the file for reading bytes."""
        if self.is_local:
            return Path(self.location).open("rb")
        return cast("IO[bytes]", fsspec.open(self.location, "rb").open())


def local_file(path: Path, parts: tuple[str, ...] | None = None) -> InputFile:
    """Return the entry of a local path. For a broken link or a special file, the entry has an `unreadable_reason`."""
    parts = parts or (path.name,)
    if path.is_symlink() and not os.path.exists(path):  # `os.path`, because pathlib fails on a link to itself
        return InputFile(str(path), parts, 0, unreadable_reason="is a broken link")
    stat = path.stat()
    if not S_ISREG(stat.st_mode):  # opening a pipe would block, and a pipe cannot be read twice
        return InputFile(
            str(path), parts, 0, unreadable_reason=f"is {SPECIAL_FILES.get(S_IFMT(stat.st_mode), 'not a regular file')}"
        )
    return InputFile(str(path), parts, stat.st_size, str(stat.st_mtime_ns))


def without_protocol(source: str) -> str:
    """Return the path of a URL of the local file system (`file:`). Return any other source unchanged."""
    is_own = is_url(source) and source.split("://")[0] in LocalFileSystem.protocol
    return str(LocalFileSystem._strip_protocol(source)) if is_own else source


def list_files(source: str) -> list[InputFile]:
    """List every file of an input, sorted by path. Links to files and folders are followed.

    Raises:
        UserError: the source does not exist, contains over `MAX_FILES` files, or has an unsupported protocol.
    """
    source = without_protocol(source)
    if not is_url(source):
        return list(_local_files(Path(source)))
    try:
        return list(_remote_files(source))
    except FileNotFoundError:
        raise UserError("--input", f"{source} does not exist", ABSENT_HINT) from None
    except (ImportError, ValueError) as error:  # an unknown protocol, or its library is not installed
        raise UserError("--input", f"{source} cannot be opened ({error})", "install the missing library") from None


def _local_files(root: Path) -> Iterator[InputFile]:
    if not root.exists():
        raise UserError("--input", f"{root} does not exist", ABSENT_HINT)
    if not root.is_dir():
        yield local_file(root)
        return
    found = list(islice(_scan(root), MAX_FILES + 1))
    _check_file_count(len(found), root)
    for file in sorted(found):
        yield local_file(file, file.relative_to(root).parts)


def _scan(folder: Path, ancestors: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Yield all files below a folder. A link to a folder that contains the link is not followed.

    The files of a folder with two links are yielded twice, because each link may be another domain or split.
    Deduplication removes the copies.
    """
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in ancestors:
        return
    with os.scandir(folder) as listing:
        entries = list(listing)  # read completely, so that only one folder is open at once
    for entry in entries:
        if os.path.isdir(entry.path):  # `os.path`, because `entry.is_dir` fails on a link to itself
            yield from _scan(Path(entry.path), ancestors | {identity})
        else:
            yield Path(entry.path)


def _remote_files(source: str) -> Iterator[InputFile]:
    system, root = fsspec.core.url_to_fs(source)
    found: dict[str, dict[str, Any]] = system.find(root, detail=True)
    if not found:
        raise FileNotFoundError(source)
    _check_file_count(len(found), source)
    for path in sorted(found):
        info = found[path]
        parts = PurePosixPath(path).relative_to(root).parts if path != root else (PurePosixPath(path).name,)
        stamp = next((str(info[key]) for key in ("ETag", "etag", "mtime", "created") if key in info), "")
        yield InputFile(system.unstrip_protocol(path), parts, int(info["size"]), stamp)


def _check_file_count(files: int, source: str | Path) -> None:
    if files > MAX_FILES:
        hint = "combine them into JSON lines or tars"
        raise UserError("--input", f"{source} contains more than {MAX_FILES:,} files", hint)
