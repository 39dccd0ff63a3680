"""Size and checksum of a file."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BLOCK = 8 << 20


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of a file.

    Attributes:
        size: bytes.
        xxh3_128: hexadecimal checksum. It detects damage, not tampering, and takes a tenth of the time of sha256.
    """

    size: int
    xxh3_128: str


def compute_digest(path: Path) -> FileDigest:
    """Read a file and return its size and checksum."""
    checksum, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
            size += len(block)
    return FileDigest(size, checksum.hexdigest())


class CheckedFile(io.RawIOBase):
    """New file that computes its size and checksum while it is written, and is synced to disk when it is closed.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._checksum, self._size = path.open("wb"), xxhash.xxh3_128(), 0

    def write(self, data: Buffer) -> int:
        """Append bytes and return their number."""
        self._checksum.update(data)
        self._size += (written := self._file.write(data))
        return written

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def close(self) -> None:
        """Sync the file to disk and close it."""
        if not self.closed:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
                super().close()

    @property
    def digest(self) -> FileDigest:
        """Size and checksum of the bytes written so far."""
        return FileDigest(self._size, self._checksum.hexdigest())
