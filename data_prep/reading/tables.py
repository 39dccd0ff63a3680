"""Parquet files: a row is a document, read a batch at a time."""

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
        file: what is read.
        fields: where a row has its text and domain.
        problems: told of malformed rows.
        advance: told of bytes read.
    """
    number = 0
    try:
        with file.open() as stream:
            for number, (record, share) in enumerate(_rows(stream, file.size, fields), start=1):
                try:
                    yield Found(f":{number}", *text_and_domain(_values(record), fields))
                except MalformedError as error:
                    problems.report(file.location, number, error.reason, error.detail, error.mend)
                advance(share)
    except MalformedError as error:  # of the file as a whole
        problems.report(file.location, None, error.reason, error.detail, error.mend)
    # Beside pyarrow's own errors, those of Python's kinds that it raises at damaged names and numbers.
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        if not _is_broken(error):
            raise
        problems.report(file.location, number + 1, "Parquet file broken", str(error))


def _is_broken(error: Exception) -> bool:
    """Whether the file's content is at fault: pyarrow says so with errors of its own, or a bare OSError without number.

    What a file system says has a number, or a type of its own.
    """
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def _rows(stream: Any, size: int, fields: Fields) -> Iterator[tuple[dict[str, pyarrow.Scalar], int]]:
    """Rows as columns' unread values, each with its share of the file's bytes."""
    facts = pyarrow.parquet.read_metadata(stream)
    columns = _columns(facts.schema.to_arrow_schema(), fields)
    # So a column of a row group is read as it is used; the default reads it whole.
    piecewise: dict[str, Any] = {"metadata": facts, "buffer_size": BUFFER_BYTES, "pre_buffer": False}
    table = pyarrow.parquet.ParquetFile(stream, **piecewise)
    leaves = [facts.schema.column(number).path for number in range(facts.num_columns)]
    encoded = pyarrow.parquet.ParquetFile(stream, **piecewise, read_dictionary=leaves)
    total, done, rows = max(facts.num_rows, 1), 0, _batch_rows(facts)
    for group in range(table.num_row_groups):  # one by one: a batch over several is lost where the last of them is
        # A value that the file holds once, in a dictionary, is copied for every row of a batch. Rows are not read as
        # references to it: what collects these keeps all values of a row group.
        first = next(encoded.iter_batches(1, row_groups=[group], columns=columns), None)
        longest = sum(map(_longest, first.columns)) if first else 0
        size_of_batch = max(1, min(rows, BATCH_BYTES // max(longest, 1)))
        for batch in table.iter_batches(size_of_batch, row_groups=[group], columns=columns):
            for row in range(batch.num_rows):
                share = size * (done + 1) // total - size * done // total
                done += 1
                yield {name: batch.column(name)[row] for name in batch.schema.names}, share


def _columns(schema: pyarrow.Schema, fields: Fields) -> list[str]:
    """Columns that are read, a nested one by its path; the others may be of any type and size.

    Raises:
        MalformedError: there is no column of text, or two columns have the name of one that is read.
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
        raise MalformedError("no text", detail, "name the column of the text with --text-key")
    return list(found)


def _batch_rows(facts: pyarrow.parquet.FileMetaData) -> int:
    """Rows at a time: about `BATCH_BYTES` of the row group whose rows are the largest."""
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    row = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(row, 1.0))))


def _longest(column: pyarrow.Array) -> int:
    """Bytes of the longest value in the dictionaries of a column; 0 where it has none."""
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
