"""Fast encoding of tar members and .npy arrays, from templates that tarfile and NumPy create.

Each document takes two tar members. webdataset's writer needs 0.15 ms for them, as long as a tokenizer needs for a few
hundred tokens. These functions need a few microseconds and give the same bytes.
"""

from __future__ import annotations

import io
import tarfile
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 512

# The header does not depend on the user, the clock or the umask: the same documents give the same bytes.
_INFO = tarfile.TarInfo()
_INFO.uname = _INFO.gname = "selectron"
_HEADER = _INFO.tobuf(tarfile.USTAR_FORMAT)
# Header fields of POSIX ustar.
_NAME, _SIZE, _CHECKSUM = slice(0, 100), slice(124, 136), slice(148, 156)
_BASE_CHECKSUM = sum(_HEADER) - sum(_HEADER[_SIZE]) - sum(_HEADER[_CHECKSUM]) + 8 * ord(" ")


def tar_member(name: bytes, content: bytes) -> bytes:
    """Return one tar member: header, content, and zeros up to a whole block.

    Args:
        name: ASCII, at most 100 bytes.
        content: less than 8 GiB.
    """
    assert len(name) <= _NAME.stop, name
    header = bytearray(_HEADER)
    size = b"%011o\0" % len(content)
    header[: len(name)] = name
    header[_SIZE] = size
    header[_CHECKSUM] = b"%06o\0 " % (_BASE_CHECKSUM + sum(name) + sum(size))
    return b"".join((header, content, bytes(-len(content) % BLOCK)))


def tar_end(length: int) -> bytes:
    """Return the end of a tar of this many bytes: two empty blocks, and zeros up to a whole record."""
    return bytes(2 * BLOCK + -(length + 2 * BLOCK) % tarfile.RECORDSIZE)


def npy_bytes(array: npt.NDArray[Any]) -> bytes:
    """Return a one-dimensional array as the content of a .npy file of version 1.0."""
    prefix, width = _npy_template(array.dtype)
    return (prefix + b"%d,), }" % len(array)).ljust(width) + b"\n" + array.tobytes()


@lru_cache(maxsize=8)
def _npy_template(dtype: np.dtype[Any]) -> tuple[bytes, int]:
    """Return the header up to the array's length, and the size of a complete header without its last byte.

    NumPy reserves space for the length, so headers of all lengths have the same size.
    """
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.empty(0, dtype), version=(1, 0), allow_pickle=False)
    header = buffer.getvalue()
    return header[: header.rindex(b"0,), }")], len(header) - 1
