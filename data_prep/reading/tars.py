"""Reader of WebDataset tars of text, in which each sample is a document."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Self

from data_prep.documents import MAX_RECORD_BYTES, Advance, MalformedError, Problems
from data_prep.reading.fields import Fields, Found, text_and_domain
from data_prep.reading.inputs import InputFile
from data_prep.reading.lines import BOM
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.printable import printable

TEXT_MEMBERS = ("txt", "text")
RECORD_MEMBER = "json"
RESERVED_NAME = re.compile(r"__[^/]*__($|/)")
"""Names that WebDataset reserves for metadata of the tar itself."""

BLOCK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20
"""Maximum number of bytes of a long name or of extended attributes. A path on Linux has at most 4,096 bytes."""

MAX_GLOBAL_ATTRIBUTES = 1000
"""Maximum number of global attributes of a tar. The number is limited because `tarfile` copies them to every member."""

MEMBER_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
"""Key and suffix in a member's name, as webdataset splits it. webdataset itself would import torch."""

IGNORED_TYPES = (tarfile.DIRTYPE, b"V", b"D")
"""Ignored members: folders, and GNU tar's volume labels and folder listings."""

OTHER_MEMBERS = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}


class _Header(tarfile.TarInfo):
    """Header whose parser raises if the header is damaged or missing. `tarfile` would take that for the tar's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse the header in a block, as `TarInfo.frombuf` does."""
        return cls._parse_checked(buf, super().frombuf, encoding, errors)

    @classmethod
    def _frombuf(cls, buf: bytes | bytearray, *args: Any, **kwargs: Any) -> Self:
        """Parse a header. Python's security releases of 2026 call this method instead of `frombuf`."""
        return cls._parse_checked(buf, super()._frombuf, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def _parse_checked(cls, buf: bytes | bytearray, parse: Callable[..., Self], *args: Any, **kwargs: Any) -> Self:
        if not buf:
            raise tarfile.ReadError("it ends without a closing block of zeros")
        try:
            header = parse(buf, *args, **kwargs)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # a regular end
                raise
            raise tarfile.ReadError(str(error)) from None
        is_extension = header.type in (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if is_extension and header.type != tarfile.GNUTYPE_SPARSE and not 0 <= header.size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a name or attributes of {header.size:,} bytes")  # tarfile would read all of it
        return header


@dataclass
class _Sample:
    """Consecutive members with the same key.

    Attributes:
        key: common part of the members' names.
        members: content of the text and record members, by suffix.
        error: error of a malformed member; None: there is none.
    """

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    error: MalformedError | None = None


def read_tar(file: InputFile, fields: Fields, problems: Problems, advance: Advance) -> Iterator[Found]:
    """Yield every well-formed sample.

    A sample has its text in `<key>.txt`, and its domain in `<key>.json`, which is a record as in a jsonl file and may
    also contain the text. Other members of a sample are ignored. A member whose name is not `<key>.<suffix>` belongs to
    no sample and is reported as malformed. A sample with a link or a device instead of a file is also malformed.

    Args:
        file: file to read.
        fields: location of text and domain in a record.
        problems: receives malformed samples.
        advance: receives the number of bytes read.
    """
    key = ""
    try:
        with file.open() as stream, tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as tar:
            for sample in _samples(tar, stream, file, problems, advance):
                key = sample.key
                try:
                    yield Found(f":{key}", *text_and_domain(_record(sample, fields), fields))
                except MalformedError as error:
                    problems.report(file.location, key, error.reason, error.detail, error.hint)
            _check_end(tar)
    # tarfile's parsers of numbers and attributes raise ValueError and similar errors for damaged headers.
    except (tarfile.TarError, EOFError, ValueError, OverflowError, LookupError) as error:
        problems.report(file.location, None, "tar broken", f"after sample {key!r}: {error}" if key else str(error))


def _samples(
    tar: tarfile.TarFile, stream: IO[bytes], file: InputFile, problems: Problems, advance: Advance
) -> Iterator[_Sample]:
    """Yield the samples in order. A sample is yielded when the next sample or the end of the tar is reached."""
    sample: _Sample | None = None
    bytes_read = 0
    for info in tar:
        if info.type not in IGNORED_TYPES and not info.isdir() and not RESERVED_NAME.match(info.name):
            name = MEMBER_NAME.match(info.name)
            if name is None:
                problems.report(file.location, printable(info.name), "not named <key>.<suffix>")
            else:
                key, suffix = name.groups()
                if sample is None or sample.key != printable(key):
                    if sample is not None:
                        yield sample
                    sample = _Sample(printable(key))
                _add(sample, tar, info, suffix.lower())
        tar.members = []  # type: ignore[attr-defined]  # otherwise every header stays in memory
        if len(tar.pax_headers) > MAX_GLOBAL_ATTRIBUTES:
            raise tarfile.ReadError(f"more than {MAX_GLOBAL_ATTRIBUTES:,} attributes for all members")
        position = stream.tell()
        advance(position - bytes_read)
        bytes_read = position
    if sample is not None:
        yield sample


def _add(sample: _Sample, tar: tarfile.TarFile, info: tarfile.TarInfo, suffix: str) -> None:
    """Add a member's content to its sample if the member contains text or a record; record a fault of the member."""
    if not info.isreg():
        kind = OTHER_MEMBERS.get(info.type, f"a member of type {info.type!r}")
        sample.error = MalformedError("not a file", f"{info.name} is {kind}")
    elif suffix in (*TEXT_MEMBERS, RECORD_MEMBER):
        if suffix in sample.members:
            sample.error = MalformedError("two members of one name", info.name)
        content = tar.extractfile(info)
        assert content is not None  # it is a regular file
        sample.members[suffix] = content.read(MAX_RECORD_BYTES + 1)


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise if data that would not be read follows the tar's end, such as another tar. Zero padding is allowed."""
    assert tar.fileobj is not None
    while block := tar.fileobj.read(BLOCK_BYTES):
        if block.count(0) < len(block):
            raise tarfile.ReadError("data follows the end of the tar, and only one tar per file is read")


def _record(sample: _Sample, fields: Fields) -> dict[str, Any]:
    """Convert the sample to a record like that of a JSON line."""
    if sample.error is not None:
        raise sample.error
    if not sample.members:
        raise MalformedError("no text", f"no .{' or .'.join((*TEXT_MEMBERS, RECORD_MEMBER))} member")
    if any(len(content) > MAX_RECORD_BYTES for content in sample.members.values()):
        raise MalformedError("too long", f"a member of more than {MAX_RECORD_BYTES:,} bytes")
    record: Any = {}
    if RECORD_MEMBER in sample.members:
        try:
            record = parse_json(sample.members[RECORD_MEMBER])
        except ValueError as error:
            raise MalformedError("not JSON", str(error)) from None
    text = next((sample.members[name] for name in TEXT_MEMBERS if name in sample.members), None)
    if text is None:
        return record
    try:
        decoded = text.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start} of the text") from None
    return {**(record if isinstance(record, dict) else {}), fields.text: decoded}
