"""Files of one JSON record a line, plain or compressed, in SlimPajama's form."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
import zstandard

from data_prep.documents import (
    LONGEST_RECORD,
    Advance,
    MalformedError,
    Problems,
    check_length,
    ignore_progress,
    short_domain,
)
from data_prep.reading.inputs import InputFile

BLOCK_BYTES = 1 << 20
PIECE_BYTES = 32 << 10
"""What is decompressed at a time: of text that repeats itself, a thousand times as much may come out."""


class BrokenStreamError(ValueError):
    """A compressed file that is damaged or ends too early."""


def read_records(
    file: InputFile, domain: str | None, problems: Problems, advance: Advance
) -> Iterator[tuple[str, str, str]]:
    """Yield (place in the file, text, domain) of every well-formed record.

    Args:
        file: what is read: `{"text": ..., "meta": {"redpajama_set_name": ...}}` a line, or a top-level `domain`.
        domain: domain of records that name none; None: such records are malformed.
        problems: told of malformed records.
        advance: told of bytes read.
    """
    number = 0
    try:
        for number, line in enumerate(read_lines(file, advance), start=1):
            if not line.strip():
                continue
            try:
                yield (f":{number}", *parse_record(line, domain))
            except MalformedError as error:
                problems.report(file.location, number, error.reason, error.detail)
    except BrokenStreamError as error:
        problems.report(file.location, number + 1, "compressed stream broken", str(error))


def parse_record(line: bytes, domain: str | None = None) -> tuple[str, str]:
    """Text and short domain name of one line.

    Raises:
        MalformedError: too long, not UTF-8, not JSON, no text, or no domain.
    """
    if len(line) > LONGEST_RECORD:
        raise MalformedError("too long", f"a line of more than {LONGEST_RECORD:,} bytes")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _parse_leniently(line)
    return text_and_domain(record, domain)


def _parse_leniently(line: bytes) -> Any:
    """What the standard library makes of a line: it takes NaN and lone surrogates, and says more about the rest."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start} of the line") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedError("not JSON", str(error)) from None


def text_and_domain(record: Any, domain: str | None = None) -> tuple[str, str]:
    """Text and short domain name of a record, whatever kind of file it stood in.

    Args:
        record: a dictionary with `text`, and `meta.redpajama_set_name` or `domain`.
        domain: domain of a record that names none.

    Raises:
        MalformedError: no text, too much of it, text that is not valid Unicode, or no domain.
    """
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise MalformedError("no text")
    check_length(len(text))
    if _has_lone_surrogate(text):
        raise MalformedError("text is not valid Unicode", "a lone surrogate")
    return text, _domain_of(record, domain)


def _domain_of(record: dict[str, Any], default: str | None) -> str:
    meta = record.get("meta")
    name = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    name = name if name is not None else record.get("domain")
    name = name if name is not None else default
    if not isinstance(name, str) or not name:
        raise MalformedError("no domain", "meta.redpajama_set_name is missing")
    return short_domain(name)


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def read_lines(file: InputFile, advance: Advance = ignore_progress) -> Iterator[bytes]:
    """Lines of a plain, gzip or zstd file, without their ends.

    Of a line of more than `LONGEST_RECORD` bytes only one byte more than that is given.

    Raises:
        BrokenStreamError: the compressed file is damaged or truncated.
    """
    blocks: Iterable[bytes] = _raw_blocks(file, advance)
    if file.suffix == ".zst":
        blocks = _decompressed(blocks, lambda: zstandard.ZstdDecompressor().decompressobj())
    elif file.suffix == ".gz":
        blocks = _decompressed(blocks, lambda: zlib.decompressobj(wbits=31))
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


def _decompressed(blocks: Iterable[bytes], make: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress members or frames one after the other.

    The libraries' own file readers end silently where a zstd frame is cut off; the `eof` flag does not lie.
    """
    stream = make()
    try:
        for piece in _cut(blocks):
            while piece:
                stream = make() if stream.eof else stream
                yield stream.decompress(piece)
                piece = stream.unused_data if stream.eof else b""
    except (zlib.error, zstandard.ZstdError) as error:
        raise BrokenStreamError(str(error)) from None
    if not stream.eof:
        raise BrokenStreamError("the file ends too early")


def _cut(blocks: Iterable[bytes]) -> Iterator[bytes]:
    return (block[start : start + PIECE_BYTES] for block in blocks for start in range(0, len(block), PIECE_BYTES))
