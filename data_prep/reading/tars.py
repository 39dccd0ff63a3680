"""WebDataset tars of text: a sample is a document."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from typing import Any

from webdataset.tariterators import group_by_keys

from data_prep.documents import LONGEST_RECORD, Advance, MalformedError, Problems
from data_prep.reading.inputs import InputFile
from data_prep.reading.records import text_and_domain

TEXT_MEMBERS = ("txt", "text")
NO_SAMPLE = re.compile(r"__[^/]*__($|/)")
"""Names that WebDataset keeps for facts about the tar itself."""


def read_tar(
    file: InputFile, domain: str | None, problems: Problems, advance: Advance
) -> Iterator[tuple[str, str, str]]:
    """Yield (place in the file, text, domain) of every well-formed sample.

    A sample has its text in `<key>.txt`, and its domain (or both) in `<key>.json`, a record as in a jsonl file.
    """
    key = ""
    try:
        with file.open() as stream:
            for sample in group_by_keys(_members(stream, advance)):
                key = sample["__key__"]
                try:
                    yield (f":{key}", *text_and_domain(_record(sample), domain))
                except MalformedError as error:
                    problems.report(f"{file.location}:{key}", None, error.reason, error.detail)
    except (tarfile.TarError, EOFError, ValueError) as error:  # ValueError: two members of one name
        problems.report(file.location, None, "tar broken", f"after sample {key!r}: {error}" if key else str(error))


def _members(stream: Any, advance: Advance) -> Iterator[dict[str, Any]]:
    done = 0
    with tarfile.open(fileobj=stream, mode="r|*") as tar:
        for info in tar:
            content = None if NO_SAMPLE.match(info.name) else tar.extractfile(info)
            if content is not None and info.isreg():
                yield {"fname": info.name, "data": content.read(LONGEST_RECORD + 1), "__url__": ""}
            tar.members = []  # type: ignore[attr-defined]  # else every header stays in memory
            position = stream.tell()
            advance(position - done)
            done = position


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
