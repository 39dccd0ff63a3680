"""Input files, on local disks and behind fsspec's URLs (s3://, gs://, hf://, memory://, ...)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import fsspec

from megatron_ext.errors import UserError
from megatron_ext.files import is_url

ABSENT = "give a file, a folder, a URL or `embedded`"

MOST_FILES = 1_000_000
"""Files of an input: every worker holds the list of them, in some 700 bytes a file, and its memory is bounded."""


@dataclass(frozen=True)
class InputFile:
    """One file of the input.

    Attributes:
        location: path or URL, as messages name it.
        parts: path inside the input, in parts; the file name alone where the input is that file.
        size: bytes.
        stamp: what changes with the content, as far as the file system tells: time of change or ETag.
    """

    location: str
    parts: tuple[str, ...]
    size: int
    stamp: str = ""

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
        """Path inside the input."""
        return "/".join(self.parts)

    @property
    def is_local(self) -> bool:
        """Whether the file has a path on this machine."""
        return not is_url(self.location)

    def open(self) -> IO[bytes]:
        """Open for reading bytes."""
        if self.is_local:
            return Path(self.location).open("rb")
        return cast("IO[bytes]", fsspec.open(self.location, "rb").open())


def local_file(path: Path, parts: tuple[str, ...] | None = None) -> InputFile:
    """A file on a local disk."""
    stat = path.stat()
    return InputFile(str(path), parts or (path.name,), stat.st_size, str(stat.st_mtime_ns))


def list_files(source: str) -> list[InputFile]:
    """Every file of an input, sorted by path.

    Raises:
        UserError: there is no such path, it holds over `MOST_FILES` files, or the URL's file system cannot be reached.
    """
    if not is_url(source):
        return list(_local_files(Path(source)))
    try:
        return list(_remote_files(source))
    except FileNotFoundError:
        raise UserError("--input", f"{source} does not exist", ABSENT) from None
    except (ImportError, ValueError) as error:  # an unknown protocol, or one whose library is not installed
        raise UserError("--input", f"{source} cannot be opened ({error})", "install what it asks for") from None


def _local_files(root: Path) -> Iterator[InputFile]:
    if not root.exists():
        raise UserError("--input", f"{root} does not exist", ABSENT)
    if root.is_file():
        yield local_file(root)
        return
    found = list(islice((file for file in root.rglob("*") if file.is_file()), MOST_FILES + 1))
    _check_number(len(found), root)
    for file in sorted(found):
        yield local_file(file, file.relative_to(root).parts)


def _remote_files(source: str) -> Iterator[InputFile]:
    system, root = fsspec.core.url_to_fs(source)
    found: dict[str, dict[str, Any]] = system.find(root, detail=True)
    if not found:
        raise FileNotFoundError(source)
    _check_number(len(found), source)
    for path in sorted(found):
        facts = found[path]
        inside = PurePosixPath(path).relative_to(root).parts if path != root else (PurePosixPath(path).name,)
        stamp = next((str(facts[key]) for key in ("ETag", "etag", "mtime", "created") if key in facts), "")
        yield InputFile(system.unstrip_protocol(path), inside, int(facts["size"]), stamp)


def _check_number(files: int, source: str | Path) -> None:
    if files > MOST_FILES:
        mend = "put them together, as lines of JSON or in tars"
        raise UserError("--input", f"{source} holds more than {MOST_FILES:,} files", mend)
