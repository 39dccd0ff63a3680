"""Parquet files: a row is a document, read a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.parquet

from data_prep.documents import Advance, MalformedError, Problems
from data_prep.reading.inputs import InputFile
from data_prep.reading.records import text_and_domain

BATCH_ROWS = 1024
BATCH_BYTES = 8 << 20
BUFFER_BYTES = 1 << 20
COLUMNS = ("text", "meta", "domain")


def read_table(
    file: InputFile, domain: str | None, problems: Problems, advance: Advance
) -> Iterator[tuple[str, str, str]]:
    """Yield (place in the file, text, domain) of every well-formed row.

    The columns are those of a JSON record: `text`, and `meta` (with a field `redpajama_set_name`) or `domain`.
    """
    number = 0
    try:
        with file.open() as stream:
            for number, (record, share) in enumerate(_rows(stream, file.size), start=1):
                try:
                    yield (f":{number}", *text_and_domain(_values(record), domain))
                except MalformedError as error:
                    problems.report(file.location, number, error.reason, error.detail)
                advance(share)
    except (pyarrow.ArrowException, OSError) as error:
        if not _is_broken(error):
            raise
        problems.report(file.location, number + 1, "Parquet file broken", str(error))


def _is_broken(error: Exception) -> bool:
    """Whether the file's content is at fault: pyarrow says so with errors of its own, or a bare OSError without number.

    What a file system says has a number, or a type of its own.
    """
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def _rows(stream: Any, size: int) -> Iterator[tuple[dict[str, pyarrow.Scalar], int]]:
    """Rows as columns' unread values, each with its share of the file's bytes."""
    # So a column of a row group is read as it is used; the default reads it whole.
    table = pyarrow.parquet.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False)
    columns = [name for name in COLUMNS if name in table.schema_arrow.names]
    if "text" not in columns:
        raise pyarrow.ArrowInvalid("no column `text`")
    total, done, rows = table.metadata.num_rows, 0, _batch_rows(table.metadata)
    for group in range(table.num_row_groups):  # one by one: a batch over several is lost where the last of them is
        for batch in table.iter_batches(rows, row_groups=[group], columns=columns):
            for row in range(batch.num_rows):
                share = size * (done + 1) // total - size * done // total
                done += 1
                yield {name: batch.column(name)[row] for name in columns}, share


def _batch_rows(facts: pyarrow.parquet.FileMetaData) -> int:
    """Rows at a time: about `BATCH_BYTES` of the row group whose rows are the largest."""
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    row = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(row, 1.0))))


def _values(record: dict[str, pyarrow.Scalar]) -> dict[str, Any]:
    try:
        return {name: value.as_py() for name, value in record.items()}
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start} of the value") from None
