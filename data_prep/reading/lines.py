"""Lines of plain, gzip and zstd files, in bounded memory for any content."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import zstandard

from data_prep.documents import LONGEST_RECORD, Advance, ignore_progress
from data_prep.reading.inputs import InputFile

BLOCK_BYTES = 1 << 20
GZIP_PIECE = 32 << 10
"""Compressed bytes passed to zlib at once: zlib copies the remaining bytes at the end of each member."""

ZSTD_PIECE = 1 << 10
"""Compressed bytes passed to zstd at once: four of them may expand to 128 KiB, all of which is returned at once."""

LARGEST_WINDOW = 128 << 20
"""Maximum bytes of past output that a zstd frame may refer to; the default limit of the `zstd` command."""

BOM = b"\xef\xbb\xbf"
"""Byte-order mark that some programs put before UTF-8; it is not part of the text."""


class BrokenStreamError(ValueError):
    """A compressed file that is damaged or ends too early."""


def read_lines(file: InputFile, advance: Advance = ignore_progress) -> Iterator[bytes]:
    """Yield the lines of a plain, gzip or zstd file, without line feeds and without a leading byte-order mark.

    A line of more than `LONGEST_RECORD` bytes is truncated to one byte more than that.

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
        return _cut(_zstd_content(_cut(blocks, ZSTD_PIECE)), BLOCK_BYTES)
    if file.suffix == ".gz":
        return _gzip_content(_cut(blocks, GZIP_PIECE))
    return blocks


def _split(blocks: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    room = LONGEST_RECORD + 1
    for block in blocks:
        first, *lines = block.split(b"\n")
        held.append(first[:room])
        room -= len(held[-1])
        if lines:
            yield b"".join(held)
            *whole, last = lines
            yield from whole
            held, room = [last], LONGEST_RECORD + 1 - len(last)
    if rest := b"".join(held):
        yield rest


def _raw_blocks(file: InputFile, advance: Advance) -> Iterator[bytes]:
    with file.open() as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
            advance(len(block))


def _gzip_content(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress members one after the other. Zeros after a member are padding, as on tapes, and are ignored."""
    stream = zlib.decompressobj(wbits=31)
    try:
        for piece in pieces:
            while piece := piece.lstrip(b"\0") if stream.eof else piece:
                stream = zlib.decompressobj(wbits=31) if stream.eof else stream
                yield stream.decompress(piece, BLOCK_BYTES)
                piece = stream.unused_data if stream.eof else stream.unconsumed_tail
        while not stream.eof and (rest := stream.decompress(b"", BLOCK_BYTES)):
            yield rest
    except zlib.error as error:
        raise BrokenStreamError(str(error)) from None
    if not stream.eof:
        raise BrokenStreamError("the file ends too early")


def _zstd_content(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress frames one after the other.

    The library's own file reader ends silently at a truncated frame, but the `eof` flag is reliable.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    stream = decompressor.decompressobj()
    try:
        for piece in pieces:
            while piece:
                stream = decompressor.decompressobj() if stream.eof else stream
                yield stream.decompress(piece)
                piece = stream.unused_data if stream.eof else b""
    except zstandard.ZstdError as error:
        raise BrokenStreamError(str(error)) from None
    if not stream.eof:
        raise BrokenStreamError("the file ends too early")


def _cut(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    for block in blocks:
        if len(block) <= size:
            yield block
        else:
            yield from (block[start : start + size] for start in range(0, len(block), size))
