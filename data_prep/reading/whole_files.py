"""Reader of whole text files, with a limit on their size."""

from __future__ import annotations

from data_prep.documents import MAX_RECORD_BYTES, Advance, MalformedError, check_length
from data_prep.reading.inputs import InputFile
from data_prep.reading.lines import BOM


def read_text(file: InputFile, advance: Advance) -> str:
    """Return the text of a UTF-8 file without a byte-order mark.

    Args:
        file: file to read.
        advance: receives the number of bytes of the whole file.

    Raises:
        MalformedError: the file has more than `MAX_RECORD_BYTES` bytes, or its text is too long, not UTF-8, or blank.
    """
    with file.open() as stream:
        content = stream.read(MAX_RECORD_BYTES + 1)
    advance(file.size)
    if len(content) > MAX_RECORD_BYTES:
        raise MalformedError("too long", f"{file.size:,} bytes, at most {MAX_RECORD_BYTES:,} are supported")
    try:
        text = content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start}") from None
    if not text.strip():
        raise MalformedError("no text")
    check_length(len(text))
    return text
