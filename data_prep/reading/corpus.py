"""Corpus of the files that `--input` names, each read according to its format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.documents import (
    LONGEST_RECORD,
    Advance,
    Document,
    MalformedError,
    Problems,
    check_length,
    ignore_progress,
)
from data_prep.reading.fields import Fields, Found
from data_prep.reading.inputs import InputFile, list_files, without_protocol
from data_prep.reading.lines import BOM
from data_prep.reading.records import read_records
from data_prep.reading.selection import (
    INDEX_SUFFIX,
    STRUCTURED,
    TABLE_SUFFIX,
    TAR_SUFFIX,
    Selection,
    is_records,
    select,
    split_folder,
)
from data_prep.reading.tables import read_table
from data_prep.reading.tars import read_tar
from data_prep.tokenization.vocabularies import TextTokenizer
from megatron_ext.utils.atomic_files import is_url
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable

Reader = Callable[[InputFile, Fields, Problems, Advance], Iterator[Found]]
"""Reads the well-formed records of one file."""


def open_files(source: str | Path, fields: Fields | None = None, tokenizer: TextTokenizer | None = None) -> FileCorpus:
    """Open the corpus in a file, a folder or under a URL.

    Args:
        source: path or URL. Files of records, tables, tars and token files are read; without any, text files.
        fields: location of text and domain in a record; None for the defaults.
        tokenizer: converts the tokens of Megatron's .bin/.idx files back to text.

    Raises:
        UserError: the path does not exist, contains nothing readable, or has token files but no tokenizer is given; see
            `select`.
    """
    source = without_protocol(str(source))
    selection = select(source, list_files(source))
    if tokenizer is None and any(file.suffix == INDEX_SUFFIX for file in selection.files):
        problem = f"is not given, but {source} contains tokens"
        raise UserError("--source-tokenizer", problem, "give the tokenizer that made the tokens")
    return FileCorpus(_own_name(source), selection, fields or Fields(), tokenizer)


class FileCorpus:
    """Documents of files; each file is a unit.

    Sub-folders named train, validation and test determine the split. If there are any, files outside them (benchmarks,
    notes) are not read. The split of text files is never determined by folders. `provenance` counts the unread files.

    Args:
        name: name of the input, and the domain of text files outside sub-folders.
        selection: files to read, and the others.
        fields: location of text and domain in a record.
        tokenizer: converts tokens back to text.
    """

    def __init__(self, name: str, selection: Selection, fields: Fields, tokenizer: TextTokenizer | None = None) -> None:
        self._selection = selection
        self.files = selection.files
        self.folders = selection.folders
        self.total_bytes = sum(file.size for file in self.files)
        self.name = name
        self._fields = fields
        self._tokenizer = tokenizer

    def with_default(self, domain: str) -> FileCorpus:
        """Return a corpus of the same files, with a domain for records that name none."""
        return FileCorpus(self.name, self._selection, replace(self._fields, default=domain), self._tokenizer)

    @property
    def has_own_domains(self) -> bool:
        """Return True if there are token files, whose names are the default domains."""
        return any(file.suffix == INDEX_SUFFIX for file in self.files)

    @property
    def units(self) -> int:
        """Number of files."""
        return len(self.files)

    def documents(self, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield every well-formed document, file by file."""
        for unit in range(self.units):
            yield from self.read(unit, problems, advance)

    def read(self, unit: int, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield every well-formed document of one file."""
        file = self.files[unit]
        for found in self._reader(file)(file, self._fields, problems, advance):
            name = f"{file.source}{found.place}"
            yield Document(name, found.text, found.domain, file.source, split_folder(file), found.changes)

    def provenance(self) -> dict[str, Any]:
        """Return the number and size of the input files that are read, and the counts of the others."""
        return {"files": len(self.files), "bytes": self.total_bytes, "not_read": self._selection.not_read}

    def identity(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.key + f"\0{file.size}\0{file.stamp}\0".encode())
        return digest.hexdigest()

    def _reader(self, file: InputFile) -> Reader:
        if is_records(file):
            return read_records
        if file.suffix == TABLE_SUFFIX:
            return read_table
        if file.suffix == TAR_SUFFIX:
            return read_tar
        if file.suffix == INDEX_SUFFIX:
            from data_prep.reading.indexed import IndexedReader  # imports Megatron and torch, only needed here

            assert self._tokenizer is not None
            return IndexedReader(self._tokenizer)
        return self._read_text

    def _read_text(self, file: InputFile, fields: Fields, problems: Problems, advance: Advance) -> Iterator[Found]:
        """Read a text file as one document; its domain is its first-level folder. A file without text is malformed."""
        with file.open() as stream:
            content = stream.read(LONGEST_RECORD + 1)
        advance(file.size)
        try:
            text = _text_of(content, file.size)
        except MalformedError as error:
            problems.report(file.location, None, error.reason, error.detail, error.hint)
            return
        yield Found("", text, printable(file.parts[0]) if len(file.parts) > 1 else fields.default or self.name)


def _text_of(content: bytes, size: int) -> str:
    """Return the text in the content of a file.

    Raises:
        MalformedError: it is too long, not UTF-8, or blank.
    """
    if len(content) > LONGEST_RECORD:
        raise MalformedError("too long", f"{size:,} bytes, at most {LONGEST_RECORD:,} are supported")
    try:
        text = content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start}") from None
    if not text.strip():
        raise MalformedError("no text")
    check_length(len(text))
    return text


def _own_name(source: str) -> str:
    """Return the name of a folder, or of a file without the suffix of its format."""
    path = PurePosixPath(source) if is_url(source) else Path(source).resolve()
    if isinstance(path, Path) and path.is_dir():
        return printable(path.name)
    packed = next((suffix for suffix in STRUCTURED if path.name.lower().endswith(suffix)), path.suffix)
    return printable(path.name[: len(path.name) - len(packed)])
