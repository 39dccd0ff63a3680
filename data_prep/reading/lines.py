"""Lines of plain, gzip and zstd files, in bounded memory whatever the content."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import zstandard

from data_prep.documents import LONGEST_RECORD, Advance, ignore_progress
from data_prep.reading.inputs import InputFile

BLOCK_BYTES = 1 << 20
GZIP_PIECE = 32 << 10
"""Compressed bytes that are given to zlib at a time: what follows a member is copied for each member."""

ZSTD_PIECE = 1 << 10
"""Compressed bytes that are given to zstd at a time: four may stand for 128 KiB, and all of it comes at once."""

LARGEST_WINDOW = 128 << 20
"""Bytes of past output that a zstd frame may refer to: the limit of the `zstd` command, too, unless it is raised."""

BOM = b"\xef\xbb\xbf"
"""Byte-order mark that some programs put before UTF-8: no part of the text."""


class BrokenStreamError(ValueError):
    """A compressed file that is damaged or ends too early."""


def read_lines(file: InputFile, advance: Advance = ignore_progress) -> Iterator[bytes]:
    """Lines of a plain, gzip or zstd file, without their ends (LF) and without a byte-order mark before the first.

    Of a line of more than `LONGEST_RECORD` bytes only one byte more than that is given.

    Args:
        file: what is read; its suffix says how it is compressed.
        advance: told of bytes read.

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
    """Decompress members one after the other. Zeros behind one are padding, as on tapes, and not looked at."""
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

    The library's own file reader ends silently where a frame is cut off; the `eof` flag does not lie.
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
