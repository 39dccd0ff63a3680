"""Lines of plain, gzip and zstd files, in bounded memory for any content."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import zstandard

from data_prep.documents import MAX_RECORD_BYTES, Advance, ignore_progress
from data_prep.reading.inputs import InputFile

BLOCK_BYTES = 1 << 20
GZIP_BLOCK_BYTES = 32 << 10
"""Number of compressed bytes passed to zlib at once. At the end of a member, zlib copies the rest of these bytes."""

ZSTD_BLOCK_BYTES = 1 << 10
"""Number of compressed bytes passed to zstd at once. Four bytes may expand to 128 KiB, which zstd returns at once."""

MAX_WINDOW_BYTES = 128 << 20
"""Maximum bytes of past output that a zstd frame may refer to; the default limit of the `zstd` command."""

BOM = b"\xef\xbb\xbf"
"""Byte-order mark that some programs put before UTF-8; it is not part of the text."""


class BrokenStreamError(ValueError):
    """Error for a compressed file that is damaged or truncated."""


def read_lines(file: InputFile, advance: Advance = ignore_progress) -> Iterator[bytes]:
    """Yield the lines of a plain, gzip or zstd file, without line feeds and without a leading byte-order mark.

    A line of more than `MAX_RECORD_BYTES` bytes is truncated to one byte more, so that the caller can recognize it.

    Args:
        file: file to read; its suffix determines the compression.
        advance: receives the number of bytes read.

    Raises:
        BrokenStreamError: the compressed file is damaged or truncated.
    """
    lines = _split(_content(file, advance))
    first = next(lines, None)
    if first is not None:
        yield first.removeprefix(BOM)
        yield from lines


def _content(file: InputFile, advance: Advance) -> Iterator[bytes]:
    blocks = _raw_blocks(file, advance)
    if file.suffix == ".zst":
        return _cut(_zstd_content(_cut(blocks, ZSTD_BLOCK_BYTES)), BLOCK_BYTES)
    if file.suffix == ".gz":
        return _gzip_content(_cut(blocks, GZIP_BLOCK_BYTES))
    return blocks


def _split(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split blocks of at most `BLOCK_BYTES` into lines, of which all but the last end with a line feed."""
    pending: list[bytes] = []
    remaining_bytes = MAX_RECORD_BYTES + 1
    for block in blocks:
        first, *lines = block.split(b"\n")
        pending.append(first[:remaining_bytes])
        remaining_bytes -= len(pending[-1])
        if lines:
            yield b"".join(pending)
            *complete, last = lines
            yield from complete
            pending, remaining_bytes = [last], MAX_RECORD_BYTES + 1 - len(last)
    if last_line := b"".join(pending):
        yield last_line


def _raw_blocks(file: InputFile, advance: Advance) -> Iterator[bytes]:
    with file.open() as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
            advance(len(block))


def _gzip_content(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress members one after the other. Zeros after a member are padding, as on tapes, and are ignored."""
    stream = zlib.decompressobj(wbits=31)
    try:
        for block in blocks:
            while block := block.lstrip(b"\0") if stream.eof else block:
                stream = zlib.decompressobj(wbits=31) if stream.eof else stream
                yield stream.decompress(block, BLOCK_BYTES)
                block = stream.unused_data if stream.eof else stream.unconsumed_tail
        while not stream.eof and (remainder := stream.decompress(b"", BLOCK_BYTES)):
            yield remainder
    except zlib.error as error:
        raise BrokenStreamError(str(error)) from None
    if not stream.eof:
        raise BrokenStreamError("the file ends too early")


def _zstd_content(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress frames one after the other.

    The library's own file reader ends silently at a truncated frame, but the `eof` flag is reliable.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    stream = decompressor.decompressobj()
    try:
        for block in blocks:
            while block:
                stream = decompressor.decompressobj() if stream.eof else stream
                yield stream.decompress(block)
                block = stream.unused_data if stream.eof else b""
    except zstandard.ZstdError as error:
        raise BrokenStreamError(str(error)) from None
    if not stream.eof:
        raise BrokenStreamError("the file ends too early")


def _cut(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Cut blocks into blocks of at most `size` bytes."""
    for block in blocks:
        if len(block) <= size:
            yield block
        else:
            yield from (block[start : start + size] for start in range(0, len(block), size))
