"""Registry of the file formats that `--input` accepts. Each format is a file in `formats/` that registers a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import data_prep.reading.formats
from data_prep.documents import Advance, Problems
from data_prep.reading.fields import Fields, Found
from data_prep.reading.inputs import InputFile
from data_prep.tokenization.vocabularies import TextTokenizer
from megatron_ext.utils.registration import import_modules

Reader = Callable[[InputFile, Fields, Problems, Advance], Iterator[Found]]
"""Reads the well-formed records of one file, reports the others, and the bytes as they are consumed."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """File format.

    Attributes:
        suffixes: suffixes of the file names, in lower case.
        open_reader: returns the reader, given the tokenizer of `--source-tokenizer`.
        is_plain_text: True if a file is one document whose folder is its domain. Such files are read only if there are
            no files of other formats.
        has_tokens: True if a file contains tokens, so that `--source-tokenizer` is required.
        companion: suffix of a second file that is read together with each file. None: there is none.
        case_sensitive: True if the suffixes are recognized in lower case only.
    """

    suffixes: tuple[str, ...]
    open_reader: Callable[[TextTokenizer | None], Reader]
    is_plain_text: bool = False
    has_tokens: bool = False
    companion: str | None = None
    case_sensitive: bool = False

    def matches(self, name: str) -> bool:
        """Return whether a file with this name has the format."""
        return (name if self.case_sensitive else name.lower()).endswith(self.suffixes)


_FORMATS: list[Format] = []


def add(form: Format) -> None:
    """Register a format.

    Raises:
        ValueError: a suffix belongs to another format.
    """
    duplicates = {suffix for existing in _FORMATS for suffix in existing.suffixes} & set(form.suffixes)
    if duplicates:
        raise ValueError(f"two formats have the suffix {min(duplicates)}")
    _FORMATS.append(form)


def register(*suffixes: str, is_plain_text: bool = False) -> Callable[[Reader], Reader]:
    """Return a decorator that registers a reader for files with one of these suffixes; see `Format`."""

    def registered(reader: Reader) -> Reader:
        add(Format(suffixes=suffixes, open_reader=lambda _: reader, is_plain_text=is_plain_text))
        return reader

    return registered


def formats() -> list[Format]:
    """Return all formats, in the order of their modules' names."""
    _load_all()
    return _FORMATS


def format_of(file: InputFile) -> Format | None:
    """Return the format of a file by its name; None if no format matches."""
    return next((form for form in formats() if form.matches(file.name)), None)


@cache
def _load_all() -> None:
    import_modules(data_prep.reading.formats)
