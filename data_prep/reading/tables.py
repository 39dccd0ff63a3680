"""Reader of Parquet files, in which each row is a document, in batches of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from data_prep.documents import Advance, MalformedError, Problems
from data_prep.reading.fields import Fields, Found, text_and_domain
from data_prep.reading.inputs import InputFile

BATCH_ROWS = 1024
BATCH_BYTES = 8 << 20
BUFFER_BYTES = 1 << 20


def read_table(file: InputFile, fields: Fields, problems: Problems, advance: Advance) -> Iterator[Found]:
    """Yield every well-formed row. The columns are the keys of a JSON record.

    Args:
        file: file to read.
        fields: location of text and domain in a row.
        problems: receives malformed rows.
        advance: receives the number of bytes read.
    """
    number = 0
    try:
        with file.open() as stream:
            for number, (record, share) in enumerate(_rows(stream, file.size, fields), start=1):
                try:
                    yield Found(f":{number}", *text_and_domain(_values(record), fields))
                except MalformedError as error:
                    problems.report(file.location, number, error.reason, error.detail, error.hint)
                advance(share)
    except MalformedError as error:  # an error of the whole file
        problems.report(file.location, None, error.reason, error.detail, error.hint)
    # Besides its own errors, pyarrow raises Python's built-in errors for damaged names and numbers.
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        if not _is_broken(error):
            raise
        problems.report(file.location, number + 1, "Parquet file broken", str(error))


def _is_broken(error: Exception) -> bool:
    """Return True if an error is due to the file's content rather than to the file system.

    For damaged content, pyarrow raises its own errors or a plain OSError without errno. Errors of a file system have an
    errno or a more specific type.
    """
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def _rows(stream: Any, size: int, fields: Fields) -> Iterator[tuple[dict[str, pyarrow.Scalar], int]]:
    """Yield (values by column, not yet converted to Python; the row's share of the file's bytes) for each row."""
    metadata = pyarrow.parquet.read_metadata(stream)
    columns = _columns(metadata.schema.to_arrow_schema(), fields)
    # Read the columns of a row group incrementally; by default they are read completely.
    piecewise: dict[str, Any] = {"metadata": metadata, "buffer_size": BUFFER_BYTES, "pre_buffer": False}
    table = pyarrow.parquet.ParquetFile(stream, **piecewise)
    leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    encoded = pyarrow.parquet.ParquetFile(stream, **piecewise, read_dictionary=leaves)
    total, rows_read, rows = max(metadata.num_rows, 1), 0, _batch_rows(metadata)
    for group in range(table.num_row_groups):  # one by one, because a broken group would spoil a batch across groups
        # A value that the file stores once, in a dictionary, is copied for every row of a batch. Reading references to
        # the dictionary instead would keep all values of a row group in memory.
        first = next(encoded.iter_batches(1, row_groups=[group], columns=columns), None)
        longest = sum(map(_longest, first.columns)) if first else 0
        size_of_batch = max(1, min(rows, BATCH_BYTES // max(longest, 1)))
        for batch in table.iter_batches(size_of_batch, row_groups=[group], columns=columns):
            for row in range(batch.num_rows):
                share = size * (rows_read + 1) // total - size * rows_read // total
                rows_read += 1
                yield {name: batch.column(name)[row] for name in batch.schema.names}, share


def _columns(schema: pyarrow.Schema, fields: Fields) -> list[str]:
    """Return the names of the columns to read. A nested column is named by its path.

    Raises:
        MalformedError: there is no text column, or two columns have the same required name.
    """
    counts = Counter(schema.names)
    found: dict[str, str] = {}
    for key in (fields.text, *fields.domains):
        name = key if key in counts else key.split(".")[0]
        if counts[name] > 1:
            raise MalformedError("two columns of one name", f"`{name}`")
        if counts[name]:
            found[key] = key
    if fields.text not in found:
        detail = f"no column `{fields.text}` among {', '.join(schema.names[:8]) or 'none'}"
        raise MalformedError("no text", detail, "give the column of the text with --text-key")
    return list(found)


def _batch_rows(metadata: pyarrow.parquet.FileMetaData) -> int:
    """Return the number of rows per batch, so that a batch of the largest rows takes about `BATCH_BYTES`."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    row = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(row, 1.0))))


def _longest(column: pyarrow.Array) -> int:
    """Return the bytes of the longest value in a column's dictionaries; 0 if the column has no dictionary."""
    if isinstance(column, pyarrow.StructArray):
        return sum(_longest(column.field(number)) for number in range(column.type.num_fields))
    if not isinstance(column, pyarrow.DictionaryArray):
        return 0
    return pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py() or 0


def _values(record: dict[str, pyarrow.Scalar]) -> dict[str, Any]:
    try:
        return {name: value.as_py() for name, value in record.items()}
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start} of the value") from None
    except (ValueError, LookupError, TypeError, OverflowError, pyarrow.ArrowException) as error:
        raise MalformedError("a value that cannot be read", str(error)) from None
