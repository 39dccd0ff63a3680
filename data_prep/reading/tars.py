"""WebDataset tars of text: a sample is a document."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, Self

from webdataset.tariterators import base_plus_ext, group_by_keys

from data_prep.documents import LONGEST_RECORD, Advance, MalformedError, Problems
from data_prep.reading.inputs import InputFile
from data_prep.reading.records import text_and_domain

TEXT_MEMBERS = ("txt", "text")
NO_SAMPLE = re.compile(r"__[^/]*__($|/)")
"""Names that WebDataset keeps for facts about the tar itself."""

BLOCK_BYTES = 1 << 20


class _Header(tarfile.TarInfo):
    """A header that is whole, or an error: Python's reader takes one that is damaged or missing for the tar's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The header in a block; see `TarInfo.frombuf`."""
        if not buf:
            raise tarfile.ReadError("it ends without a closing block of zeros")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # the end, indeed
                raise
            raise tarfile.ReadError(str(error)) from None


def read_tar(
    file: InputFile, domain: str | None, problems: Problems, advance: Advance
) -> Iterator[tuple[str, str, str]]:
    """Yield (place in the file, text, domain) of every well-formed sample.

    A sample has its text in `<key>.txt`, and its domain (or both) in `<key>.json`, a record as in a jsonl file. A
    member that is named otherwise belongs to no sample, and is malformed.
    """
    key = ""
    try:
        with file.open() as stream, tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as tar:
            for sample in group_by_keys(_named(_members(tar, stream, advance), file, problems)):
                key = sample["__key__"]
                try:
                    yield (f":{key}", *text_and_domain(_record(sample), domain))
                except MalformedError as error:
                    problems.report(file.location, key, error.reason, error.detail)
            _check_rest(tar)
    except (tarfile.TarError, EOFError, ValueError) as error:  # ValueError: two members of one name
        problems.report(file.location, None, "tar broken", f"after sample {key!r}: {error}" if key else str(error))


def _named(members: Iterable[dict[str, Any]], file: InputFile, problems: Problems) -> Iterator[dict[str, Any]]:
    """Members that have a key and a suffix; WebDataset passes over the others without a word."""
    for member in members:
        if base_plus_ext(member["fname"])[0] is None:
            problems.report(file.location, member["fname"], "not named <key>.<suffix>")
        else:
            yield member


def _members(tar: tarfile.TarFile, stream: Any, advance: Advance) -> Iterator[dict[str, Any]]:
    done = 0
    for info in tar:
        content = None if NO_SAMPLE.match(info.name) else tar.extractfile(info)
        if content is not None and info.isreg():
            yield {"fname": info.name, "data": content.read(LONGEST_RECORD + 1), "__url__": ""}
        tar.members = []  # type: ignore[attr-defined]  # else every header stays in memory
        position = stream.tell()
        advance(position - done)
        done = position


def _check_rest(tar: tarfile.TarFile) -> None:
    """Refuse what stands behind a tar's end, another tar for example, as nothing reads it. Zeros fill up a record."""
    assert tar.fileobj is not None
    while block := tar.fileobj.read(BLOCK_BYTES):
        if block.count(0) < len(block):
            raise tarfile.ReadError("there is more behind its end, and one tar is read of a file")


def _record(sample: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, bytes) and len(value) > LONGEST_RECORD for value in sample.values()):
        raise MalformedError("too long", f"a member of more than {LONGEST_RECORD:,} bytes")
    record: Any = {}
    if "json" in sample:
        try:
            record = json.loads(sample["json"])
        except (ValueError, RecursionError) as error:
            raise MalformedError("not JSON", str(error)) from None
    text = next((sample[name] for name in TEXT_MEMBERS if name in sample), None)
    if text is None:
        return record
    try:
        return {**(record if isinstance(record, dict) else {}), "text": text.decode("utf-8")}
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start} of the text") from None
