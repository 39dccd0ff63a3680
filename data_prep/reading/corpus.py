"""Corpus of the files that `--input` names, each read according to its format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.documents import Advance, Document, Problems, ignore_progress
from data_prep.reading.fields import Fields, Found
from data_prep.reading.inputs import InputFile, list_files, without_protocol
from data_prep.reading.registry import format_of, formats
from data_prep.reading.selection import Selection, has_tokens, select, split_folder
from data_prep.tokenization.vocabularies import TextTokenizer
from megatron_ext.utils.atomic_files import is_url
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable


def open_files(source: str | Path, fields: Fields | None = None, tokenizer: TextTokenizer | None = None) -> FileCorpus:
    """Open the corpus in a file, a folder or under a URL.

    Args:
        source: path or URL. Text files are read only if there are no files of records, tables, tars or token files.
        fields: location of text and domain in a record. None: the defaults.
        tokenizer: converts the tokens of Megatron's .bin/.idx files back to text.

    Raises:
        UserError: the path does not exist, contains nothing readable, or has token files but no tokenizer is given; see
            `select`.
    """
    source = without_protocol(str(source))
    selection = select(source, list_files(source))
    if tokenizer is None and any(has_tokens(file) for file in selection.files):
        problem = f"is not given, but {source} contains tokens"
        raise UserError("--source-tokenizer", problem, "give the tokenizer that made the tokens")
    return FileCorpus(_input_name(source), selection, fields or Fields(), tokenizer)


class FileCorpus:
    """Corpus of the documents in files. Each file is a unit.

    Subfolders named train, validation and test determine the split. If there are any, files outside of them are not
    read. The split of text files is never determined by folders. `provenance` counts the unread files.

    Args:
        name: name of the input, and the domain of text files outside of subfolders.
        selection: files to read, and counts of the other files.
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
        return any(has_tokens(file) for file in self.files)

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
        for found in self._read_records(file, problems, advance):
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

    def _read_records(self, file: InputFile, problems: Problems, advance: Advance) -> Iterator[Found]:
        """Yield the well-formed records of a file."""
        form, fields = format_of(file), self._fields
        assert form is not None, "`select` has selected it"
        if form.is_plain_text and not fields.default:
            fields = replace(fields, default=self.name)
        return form.open_reader(self._tokenizer)(file, fields, problems, advance)


def _input_name(source: str) -> str:
    """Return the name of a folder, or of a file without the suffix of its format."""
    path = PurePosixPath(source) if is_url(source) else Path(source).resolve()
    if isinstance(path, Path) and path.is_dir():
        return printable(path.name)
    suffixes = [suffix for form in formats() if not form.is_plain_text for suffix in form.suffixes]
    suffix = next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), path.suffix)
    return printable(path.name[: len(path.name) - len(suffix)])
