"""Readers: a file or folder of raw text becomes a stream of documents with a domain and, where given, a split."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import zstandard

from megatron_ext.errors import UserError

SPLITS = ("train", "validation", "test")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".css", ".sql", ".sh"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".r", ".jl"}
    | {".scala", ".kt", ".swift", ".php", ".pl", ".lua", ".hs", ".ml"}
)
BLOCK_BYTES = 1 << 20

Advance = Callable[[int], None]
"""Told the number of input bytes consumed, as they are."""


def ignore_progress(_: int) -> None:
    """An `Advance` for passes that show no progress."""


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        id: where it stands in the input: `file:line`, a file, or a dotted name.
        text: its text, never empty, always valid Unicode.
        domain: name of its domain.
        source: file or collection that it comes from.
        folder: the split whose folder it lies in; None where folders do not give the split.
    """

    id: str
    text: str
    domain: str
    source: str
    folder: str | None = None


@dataclass
class Problems:
    """What to do about malformed records, and the count of those passed over.

    Attributes:
        on_error: `stop` raises at the first one, `skip` counts.
        counts: number of skipped records by (file, reason).
    """

    on_error: Literal["stop", "skip"] = "stop"
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def report(self, file: str, line: int | None, reason: str, detail: str = "") -> None:
        """Count a malformed record, or stop.

        Args:
            file: input file.
            line: line inside it, from 1; None for a whole file.
            reason: kind of defect; skipped records are counted by it.
            detail: more about this one record.

        Raises:
            UserError: `on_error` is `stop`.
        """
        if self.on_error == "stop":
            where = file if line is None else f"{file}:{line}"
            problem = f"{reason} ({detail})" if detail else reason
            raise UserError(where, " ".join(problem.split()), "repair it or pass --on-error skip")
        self.counts[file, reason] += 1


class Corpus(Protocol):
    """A re-readable collection of documents in a fixed order."""

    @property
    def folders(self) -> frozenset[str]:
        """Splits that the input's own folders give; empty where a hash decides."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes that a whole pass reports to `advance`."""
        ...

    def documents(self, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """All documents, in the same order on every pass."""
        ...

    def provenance(self) -> dict[str, Any]:
        """What the documents come from, for the manifest."""
        ...


def short_domain(name: str) -> str:
    """Domain name without SlimPajama's prefix: `RedPajamaC4` -> `C4`."""
    return name[len("redpajama") :] if name.lower().startswith("redpajama") and len(name) > len("redpajama") else name


def open_files(path: Path) -> Corpus:
    """Choose the reader for a file or folder.

    Raises:
        UserError: there is no such path, or nothing readable in it.
    """
    if not path.exists():
        raise UserError("--input", f"{path} does not exist", "give a file, a folder, or `embedded`")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    records = [file for file in files if file.name.endswith(RECORD_SUFFIXES)]
    if records:
        return RecordCorpus(path, records)
    texts = [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
    if not texts:
        known = ", ".join(RECORD_SUFFIXES)
        raise UserError("--input", f"{path} holds neither {known} nor text files", "give a folder that does")
    return TextCorpus(path, texts)


class _FileCorpus:
    def __init__(self, root: Path, files: list[Path]) -> None:
        self.root = root
        self.files = files
        self.total_bytes = sum(file.stat().st_size for file in files)
        self.folders: frozenset[str] = frozenset()

    def parts(self, file: Path) -> tuple[str, ...]:
        """Path of a file inside the input, in parts; the file name alone where the input is that file."""
        return file.relative_to(self.root).parts if file != self.root else (file.name,)

    def provenance(self) -> dict[str, Any]:
        """Number and size of the input files."""
        return {"files": len(self.files), "bytes": self.total_bytes}


class TextCorpus(_FileCorpus):
    """A folder of text files: a document a file, a domain a first-level sub-folder.

    Files directly in the folder belong to a domain named after the folder.
    """

    def documents(self, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield a document for every file that has text in it; empty files are no documents."""
        for file in self.files:
            parts, content = self.parts(file), file.read_bytes()
            advance(len(content))
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                problems.report(str(file), None, "not UTF-8", f"byte {error.start}")
                continue
            if text.strip():
                domain = parts[0] if len(parts) > 1 else self._own_name()
                yield Document("/".join(parts), text, domain, "/".join(parts))

    def _own_name(self) -> str:
        folder = self.root.resolve()
        return folder.stem if folder.is_file() else folder.name


class RecordCorpus(_FileCorpus):
    """Files of one JSON record a line, in SlimPajama's form: `{"text": ..., "meta": {"redpajama_set_name": ...}}`.

    A record may instead name its domain in a top-level `domain`. Sub-folders called train, validation and test give
    the split; where there are such, files outside them (benchmarks, notes) are not read.
    """

    def __init__(self, root: Path, files: list[Path]) -> None:
        super().__init__(root, files)
        inside = [file for file in files if self._folder(file)]
        if inside:
            super().__init__(root, inside)
            self.folders = frozenset(folder for file in inside if (folder := self._folder(file)))

    def documents(self, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield every well-formed record, file by file."""
        for file in self.files:
            yield from self._read(file, problems, advance)

    def _folder(self, file: Path) -> str | None:
        parts = self.parts(file)
        return parts[0] if len(parts) > 1 and parts[0] in SPLITS else None

    def _read(self, file: Path, problems: Problems, advance: Advance) -> Iterator[Document]:
        source, folder, number = "/".join(self.parts(file)), self._folder(file), 0
        try:
            for number, line in enumerate(read_lines(file, advance), start=1):
                if not line.strip():
                    continue
                try:
                    text, domain = parse_record(line)
                except MalformedError as error:
                    problems.report(str(file), number, error.reason, error.detail)
                    continue
                yield Document(f"{source}:{number}", text, domain, source, folder)
        except BrokenStreamError as error:
            problems.report(str(file), number + 1, "compressed stream broken", str(error))


class MalformedError(ValueError):
    """A record that is no document: a kind of defect and the detail of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class BrokenStreamError(ValueError):
    """A compressed file that is damaged or ends too early."""


def parse_record(line: bytes) -> tuple[str, str]:
    """Text and short domain name of one record.

    Raises:
        MalformedError: not UTF-8, not JSON, no text, or no domain.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedError("not UTF-8", f"byte {error.start} of the line") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedError("not JSON", str(error)) from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise MalformedError("no text")
    if _has_lone_surrogate(text):
        raise MalformedError("text is not valid Unicode", "a lone surrogate")
    return text, _domain_of(record)


def _domain_of(record: dict[str, Any]) -> str:
    meta = record.get("meta")
    name = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    name = name if name is not None else record.get("domain")
    if not isinstance(name, str) or not name:
        raise MalformedError("no domain", "meta.redpajama_set_name is missing")
    return short_domain(name)


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def read_lines(file: Path, advance: Advance = ignore_progress) -> Iterator[bytes]:
    """Lines of a plain, gzip or zstd file, without their ends.

    Raises:
        BrokenStreamError: the compressed file is damaged or truncated.
    """
    blocks: Iterable[bytes] = _raw_blocks(file, advance)
    if file.suffix == ".zst":
        blocks = _decompressed(blocks, lambda: zstandard.ZstdDecompressor().decompressobj())
    elif file.suffix == ".gz":
        blocks = _decompressed(blocks, lambda: zlib.decompressobj(wbits=31))
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _raw_blocks(file: Path, advance: Advance) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
            advance(len(block))


def _decompressed(blocks: Iterable[bytes], make: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress members or frames one after the other.

    The libraries' own file readers end silently where a zstd frame is cut off; the `eof` flag does not lie.
    """
    stream = make()
    try:
        for block in blocks:
            while block:
                stream = make() if stream.eof else stream
                yield stream.decompress(block)
                block = stream.unused_data if stream.eof else b""
    except (zlib.error, zstandard.ZstdError) as error:
        raise BrokenStreamError(str(error)) from None
    if not stream.eof:
        raise BrokenStreamError("the file ends too early")
