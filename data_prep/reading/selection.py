"""Which files of an input are read, and which are not and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from data_prep.documents import SPLITS
from data_prep.reading.inputs import InputFile
from megatron_ext.errors import UserError
from megatron_ext.printable import printable

RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLE_SUFFIX, TAR_SUFFIX, INDEX_SUFFIX = ".parquet", ".tar", ".idx"
STRUCTURED = (*RECORD_SUFFIXES, TABLE_SUFFIX, TAR_SUFFIX, INDEX_SUFFIX)
TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".css", ".sql", ".sh"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".r", ".jl"}
    | {".scala", ".kt", ".swift", ".php", ".pl", ".lua", ".hs", ".ml"}
)
PACKED_SUFFIXES = frozenset({".gz", ".xz", ".bz2", ".zst", ".lz4", ".zip"})
"""Of files whose kind the suffix before tells, too."""

UNKNOWN = "of no form that is read"
BESIDE = "text beside files of records"
OUTSIDE = f"outside the folders {', '.join(SPLITS)}"
NO_INDEX = "without an .idx beside it"

MOST_KINDS = 20
"""Kinds of files not read that are told apart: names may end in anything, such as a number each."""

MOST_EXAMPLES = 3


@dataclass(frozen=True)
class Selection:
    """What is read of an input.

    Attributes:
        files: what is read, in order.
        folders: splits that folders give.
        not_read: the other files, counted by `suffix` and `reason`, as dictionaries for the manifest.
    """

    files: list[InputFile]
    folders: frozenset[str] = frozenset()
    not_read: list[dict[str, Any]] = field(default_factory=list)


def select(source: str, files: list[InputFile]) -> Selection:
    """Choose what is read: files of records, tables, tars and token files, those in folders of splits if there are any.

    Text files are read where there is nothing else.

    Args:
        source: the input, for messages.
        files: all of it.

    Raises:
        UserError: there is nothing to read, a link leads nowhere, or folders of splits lie where they give none.
    """
    structured = [file for file in files if is_structured(file)]
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    if not structured and not texts:
        known = ", ".join(STRUCTURED)
        raise UserError("--input", f"{source} holds neither {known} nor text files", "give a folder that does")
    inside = [file for file in structured if split_folder(file)]
    if not inside:
        _check_no_splits_below(source, structured)
    read = inside or structured or texts
    _check_present(read)
    folders = frozenset(folder for file in inside if (folder := split_folder(file)))
    return Selection(read, folders, _not_read(files, read))


def is_records(file: InputFile) -> bool:
    """Whether a file has a record a line."""
    return file.name.lower().endswith(RECORD_SUFFIXES)


def is_structured(file: InputFile) -> bool:
    """Whether a file is one of records, a table, a tar or an index of tokens, by its name."""
    if file.suffix == INDEX_SUFFIX:
        return file.name.endswith(INDEX_SUFFIX)  # Megatron opens no other spelling
    return is_records(file) or file.suffix in (TABLE_SUFFIX, TAR_SUFFIX)


def split_folder(file: InputFile) -> str | None:
    """The split whose folder a file lies in; None for text files, whose folders are domains."""
    if is_structured(file) and len(file.parts) > 1 and file.parts[0] in SPLITS:
        return file.parts[0]
    return None


def _check_present(files: list[InputFile]) -> None:
    """Refuse what cannot be read before the work begins, not when it comes to it."""
    for file in files:
        if file.refusal:
            raise UserError(file.location, file.refusal, "mend it or remove it")


def _check_no_splits_below(source: str, files: list[InputFile]) -> None:
    """Refuse an input of which a folder below is split: a hash would put test documents in train."""
    found = dict.fromkeys(place for file in files if (place := _split_below(file)))
    if not found:
        return
    splits = ", ".join(name for name in SPLITS if any(split == name for _, split in found))
    parents = [f"{source.rstrip('/')}/{parent}" for parent in dict.fromkeys(parent for parent, _ in found)]
    shown = ", ".join([*parents[:MOST_EXAMPLES], *(["..."] if len(parents) > MOST_EXAMPLES else [])])
    mend = f"give {shown} as --input"
    if len(parents) > 1:
        mend = f"give one of {shown} as --input, or put folders {', '.join(SPLITS)} at the top"
    raise UserError("--input", f"{source} has {splits} below {shown}, and only at the top they give the split", mend)


def _split_below(file: InputFile) -> tuple[str, str] | None:
    """The first folder of a file's path that is called as a split: the path above it, and its name."""
    for place, part in enumerate(file.parts[:-1]):
        if part in SPLITS:
            return "/".join(file.parts[:place]), part
    return None


def _not_read(files: list[InputFile], read: list[InputFile]) -> list[dict[str, Any]]:
    """Counts of the other files, most first, each with the names of a few."""
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for file, reason in _others(files, read):
        suffix = printable(_suffix(file.name))
        kind = kinds.setdefault((suffix, reason), {"suffix": suffix, "reason": reason, "files": 0, "examples": []})
        _add(kind, 1, [file.source])
    ordered = sorted(kinds.values(), key=lambda kind: (-kind["files"], kind["reason"], kind["suffix"]))
    for kind in ordered[MOST_KINDS:]:
        _add(ordered[MOST_KINDS - 1], kind["files"], kind["examples"])
        ordered[MOST_KINDS - 1] |= {"suffix": "other", "reason": "of further kinds"}
    return ordered[:MOST_KINDS]


def _others(files: list[InputFile], read: list[InputFile]) -> Iterator[tuple[InputFile, str]]:
    """Files that are not read, each with why; a .bin is read where its .idx is."""
    taken = {file.parts for file in read}
    indexed = {file.source.removesuffix(INDEX_SUFFIX) for file in files if file.name.endswith(INDEX_SUFFIX)}
    for file in files:
        if file.parts in taken or (file.name.endswith(".bin") and file.source.removesuffix(".bin") in indexed):
            continue
        if is_structured(file):
            yield file, OUTSIDE
        elif file.suffix in TEXT_SUFFIXES:
            yield file, BESIDE
        else:
            yield file, NO_INDEX if file.suffix == ".bin" else UNKNOWN


def _add(kind: dict[str, Any], files: int, examples: list[str]) -> None:
    kind["files"] += files
    kind["examples"] = [*kind["examples"], *examples][:MOST_EXAMPLES]


def _suffix(name: str) -> str:
    """What a name ends in, in lower case: `.json`, `.jsonl.xz`; nothing where it has no suffix."""
    suffixes = PurePosixPath(name.lower()).suffixes
    return "".join(suffixes[-2:] if suffixes and suffixes[-1] in PACKED_SUFFIXES else suffixes[-1:])
