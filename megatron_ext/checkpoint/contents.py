"""What a file holds, in short: size and checksum."""

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
class Content:
    """What a file holds.

    Attributes:
        size: bytes.
        xxh3_128: checksum, hexadecimal. A tenth of sha256's time; what it is to find is damage, not malice.
    """

    size: int
    xxh3_128: str


def content_of(path: Path) -> Content:
    """What a file holds, read from the disk."""
    checksum, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
            size += len(block)
    return Content(size, checksum.hexdigest())


class CheckedFile(io.RawIOBase):
    """A new file that keeps account of what is written into it, and is on the disk once it is closed.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._checksum, self._size = path.open("wb"), xxhash.xxh3_128(), 0

    def write(self, data: Buffer) -> int:
        """Append bytes; their number."""
        self._checksum.update(data)
        self._size += (written := self._file.write(data))
        return written

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def close(self) -> None:
        """Force what was written to the disk."""
        if not self.closed:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
                super().close()

    @property
    def content(self) -> Content:
        """What was written so far."""
        return Content(self._size, self._checksum.hexdigest())
