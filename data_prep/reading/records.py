"""Files with one JSON record per line, plain or compressed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson

from data_prep.documents import MAX_RECORD_BYTES, Advance, MalformedError, Problems
from data_prep.reading.fields import Fields, Found, text_and_domain
from data_prep.reading.inputs import InputFile
from data_prep.reading.lines import BrokenStreamError, read_lines


def read_records(file: InputFile, fields: Fields, problems: Problems, advance: Advance) -> Iterator[Found]:
    """Yield every well-formed record.

    Args:
        file: file to read.
        fields: location of text and domain in a record.
        problems: receives malformed records.
        advance: receives the number of bytes read.
    """
    number = 0
    try:
        for number, line in enumerate(read_lines(file, advance), start=1):
            if not line.strip():
                continue
            try:
                yield Found(f":{number}", *parse_record(line, fields))
            except MalformedError as error:
                problems.report(file.location, number, error.reason, error.detail, error.hint)
    except BrokenStreamError as error:
        problems.report(file.location, number + 1, "compressed stream broken", str(error))


def parse_record(line: bytes, fields: Fields) -> tuple[str, str]:
    """Return text and short domain name of one line.

    Raises:
        MalformedError: too long, not UTF-8, not JSON, no text, or no domain.
    """
    if len(line) > MAX_RECORD_BYTES:
        raise MalformedError("too long", f"a line of more than {MAX_RECORD_BYTES:,} bytes")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _parse_leniently(line)
    return text_and_domain(record, fields)


def _parse_leniently(line: bytes) -> Any:
    """Parse with the standard library, which accepts NaN and lone surrogates and describes other errors in detail."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:  # a plain ValueError means a number with too many digits
        lone_returns = (
            "; it contains carriage returns, but lines must end with line feeds" if b"\r" in line[:-1] else ""
        )
        raise MalformedError("not JSON", f"{error}{lone_returns}") from None
