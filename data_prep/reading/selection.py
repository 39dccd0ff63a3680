"""Selection of the input files to read, and the reasons why the other files are not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from data_prep.documents import SPLITS
from data_prep.reading.inputs import InputFile
from data_prep.reading.registry import format_of, formats
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable

PACKED_SUFFIXES = frozenset({".gz", ".xz", ".bz2", ".zst", ".lz4", ".zip"})
"""Suffixes of compressed files. The suffix before such a suffix determines the format."""

UNKNOWN_REASON = "unsupported format"
BESIDE_REASON = "text beside files of records"
OUTSIDE_REASON = f"outside the folders {', '.join(SPLITS)}"

MAX_KINDS = 20
"""Maximum number of kinds (suffix and reason) of unread files that are counted separately."""

MAX_EXAMPLES = 3


@dataclass(frozen=True)
class Selection:
    """Selected files of an input.

    Attributes:
        files: files to read, in order.
        folders: splits that are determined by folders.
        not_read: files that are not read, counted by `suffix` and `reason`, as dictionaries for the manifest.
    """

    files: list[InputFile]
    folders: frozenset[str] = frozenset()
    not_read: list[dict[str, Any]] = field(default_factory=list)


def select(source: str, files: list[InputFile]) -> Selection:
    """Select the files to read.

    Files with records or tokens in split folders are selected if there are any. Otherwise all files with records or
    tokens are selected. Plain text files are selected if there are no other files of a known format.

    Args:
        source: the input, for messages.
        files: all files of the input.

    Raises:
        UserError: there is nothing to read, a link is broken, or split folders are not at the top level.
    """
    structured = [file for file in files if is_structured(file)]
    texts = [file for file in files if is_text(file)]
    if not structured and not texts:
        known = ", ".join(suffix for form in formats() if not form.is_plain_text for suffix in form.suffixes)
        raise UserError("--input", f"{source} contains no {known} or text files", "give a folder that does")
    inside = [file for file in structured if split_folder(file)]
    if not inside:
        _check_no_splits_below(source, structured)
    read = inside or structured or texts
    _check_present(read)
    folders = frozenset(folder for file in inside if (folder := split_folder(file)))
    return Selection(read, folders, _not_read(files, read))


def is_structured(file: InputFile) -> bool:
    """Return whether a file has a known format other than plain text, judged by its name."""
    form = format_of(file)
    return form is not None and not form.is_plain_text


def is_text(file: InputFile) -> bool:
    """Return whether a file is plain text, judged by its name."""
    form = format_of(file)
    return form is not None and form.is_plain_text


def has_tokens(file: InputFile) -> bool:
    """Return whether a file contains tokens, judged by its name."""
    form = format_of(file)
    return form is not None and form.has_tokens


def split_folder(file: InputFile) -> str | None:
    """Return the split whose folder contains a file; None for text files, whose folders are domains."""
    if is_structured(file) and len(file.parts) > 1 and file.parts[0] in SPLITS:
        return file.parts[0]
    return None


def _check_present(files: list[InputFile]) -> None:
    """Raise for a file that cannot be read, before the work begins."""
    for file in files:
        if file.unreadable_reason:
            raise UserError(file.location, file.unreadable_reason, "fix it or remove it")


def _check_no_splits_below(source: str, files: list[InputFile]) -> None:
    """Raise if there are split folders below the top level, whose test documents a hash could assign to train."""
    found = dict.fromkeys(folder for file in files if (folder := _split_below(file)))
    if not found:
        return
    splits = ", ".join(name for name in SPLITS if any(split == name for _, split in found))
    parents = [f"{source.rstrip('/')}/{parent}" for parent in dict.fromkeys(parent for parent, _ in found)]
    listed = ", ".join([*parents[:MAX_EXAMPLES], *(["..."] if len(parents) > MAX_EXAMPLES else [])])
    hint = f"give {listed} as --input"
    if len(parents) > 1:
        hint = f"give one of {listed} as --input, or put the folders {', '.join(SPLITS)} at the top level"
    problem = f"{source} has {splits} below {listed}, but split folders must be at the top level"
    raise UserError("--input", problem, hint)


def _split_below(file: InputFile) -> tuple[str, str] | None:
    """Return (parent path, name) of the first folder in a file's path that has the name of a split."""
    for index, part in enumerate(file.parts[:-1]):
        if part in SPLITS:
            return "/".join(file.parts[:index]), part
    return None


def _not_read(files: list[InputFile], read: list[InputFile]) -> list[dict[str, Any]]:
    """Count the files that are not read by kind, most frequent kind first, with a few names per kind."""
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for file, reason in _unread_files(files, read):
        suffix = printable(_suffix(file.name))
        kind = kinds.setdefault((suffix, reason), {"suffix": suffix, "reason": reason, "files": 0, "examples": []})
        _add(kind, 1, [file.source])
    sorted_kinds = sorted(kinds.values(), key=lambda kind: (-kind["files"], kind["reason"], kind["suffix"]))
    for kind in sorted_kinds[MAX_KINDS:]:
        _add(sorted_kinds[MAX_KINDS - 1], kind["files"], kind["examples"])
        sorted_kinds[MAX_KINDS - 1] |= {"suffix": "other", "reason": "of further kinds"}
    return sorted_kinds[:MAX_KINDS]


def _unread_files(files: list[InputFile], read: list[InputFile]) -> Iterator[tuple[InputFile, str]]:
    """Yield the files that are not read, each with the reason; a companion, such as a .bin, is read with its file."""
    selected = {file.parts for file in read}
    companions = {form.companion: form.suffixes[0] for form in formats() if form.companion is not None}
    found = {file.source for file in files}
    for file in files:
        suffix = companions.get(file.suffix)
        is_companion = suffix is not None and file.name.endswith(file.suffix)
        if file.parts in selected or (is_companion and file.source.removesuffix(file.suffix) + str(suffix) in found):
            continue
        if is_structured(file):
            yield file, OUTSIDE_REASON
        elif is_text(file):
            yield file, BESIDE_REASON
        else:
            yield file, UNKNOWN_REASON if suffix is None else f"without an {suffix} beside it"


def _add(kind: dict[str, Any], files: int, examples: list[str]) -> None:
    kind["files"] += files
    kind["examples"] = [*kind["examples"], *examples][:MAX_EXAMPLES]


def _suffix(name: str) -> str:
    """Return the suffix of a name in lower case, `.json` or `.jsonl.xz`; empty if it has none."""
    suffixes = PurePosixPath(name.lower()).suffixes
    return "".join(suffixes[-2:] if suffixes and suffixes[-1] in PACKED_SUFFIXES else suffixes[-1:])
