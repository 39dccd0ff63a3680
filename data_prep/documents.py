"""Documents, the handling of malformed records, and the interface of a corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from megatron_ext.utils.credentials import redact
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable

SPLITS = ("train", "validation", "test")

MAX_TEXT_LENGTH = 16_000_000
"""Maximum number of characters of a document, or of tokens if the input is tokenised.

A longer document counts as malformed, because a worker has limited memory and must keep whole documents in it.
"""

MAX_RECORD_BYTES = 64 << 20
"""Maximum number of bytes of a line, tar member or text file. JSON may take six bytes per character."""

REPAIR_HINT = "repair it"

Advance = Callable[[int], None]
"""Callback that receives the number of input bytes consumed, as stored (possibly compressed)."""


def ignore_progress(_: int) -> None:
    """Ignore progress: an `Advance` for passes without a progress bar."""


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        id: location in the input: `file:line`, a file, or a dotted name.
        text: the text, never empty, always valid Unicode.
        domain: name of the domain.
        source: file or collection that contains the document.
        folder: split whose folder contains the document; None if folders do not determine the split.
        changes: changes that the reader made to the text, as keys of the counts in the manifest's `cleaned`.
    """

    id: str
    text: str
    domain: str
    source: str
    folder: str | None = None
    changes: tuple[str, ...] = ()


@dataclass
class Problems:
    """Handling of malformed records, and the number of skipped records.

    Attributes:
        on_error: `stop` raises at the first malformed record, `skip` counts malformed records.
        alternative: alternative to repairing the record, for the error message.
        counts: number of skipped records by (file, reason).
    """

    on_error: Literal["stop", "skip"] = "stop"
    alternative: str = "pass --on-error skip"
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def report(self, file: str, line: int | str | None, reason: str, detail: str = "", hint: str = REPAIR_HINT) -> None:
        """Count a malformed record, or stop.

        Args:
            file: input file. Undecodable bytes of the name appear as escapes in the key of `counts`.
            line: line number from 1, or another location in the file; None for a whole file.
            reason: kind of defect, by which skipped records are counted.
            detail: details of this record's defect.
            hint: alternative to skipping the record, for the error message.

        Raises:
            UserError: `on_error` is `stop`.
        """
        if self.on_error == "stop":
            where = file if line is None else f"{file}:{line}"
            problem = f"{reason} ({detail})" if detail else reason
            raise UserError(where, " ".join(problem.split()), f"{hint} or {self.alternative}")
        self.counts[printable(redact(file)), reason] += 1


class Corpus(Protocol):
    """Collection of documents in a fixed order that can be read repeatedly, divided into separately readable units."""

    @property
    def folders(self) -> frozenset[str]:
        """Splits that have their own folder in the input; empty if a hash assigns each document's split."""
        ...

    @property
    def units(self) -> int:
        """Number of units: the input's files, in order."""
        ...

    @property
    def total_bytes(self) -> int:
        """Number of bytes that a complete pass reports to `advance`."""
        ...

    def read(self, unit: int, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield the documents of one unit, in the same order on every pass."""
        ...

    def documents(self, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield the documents of all units in order."""
        ...

    def provenance(self) -> dict[str, Any]:
        """Describe the source of the documents, for the manifest."""
        ...

    def identity(self) -> str:
        """Return a digest that changes with the input, so that a stopped preparation only resumes with equal input."""
        ...


def short_domain(name: str) -> str:
    """Return a domain name without SlimPajama's prefix: `RedPajamaC4` -> `C4`."""
    return name[len("redpajama") :] if name.lower().startswith("redpajama") and len(name) > len("redpajama") else name


def domain_key(name: str) -> str:
    """Return the key by which spellings of a domain are compared: its short form, without case."""
    return short_domain(name).casefold()


class MalformedError(ValueError):
    """Error for a malformed record.

    Args:
        reason: kind of defect.
        detail: details of this record's defect.
        hint: alternative to skipping the record.
    """

    def __init__(self, reason: str, detail: str = "", hint: str = REPAIR_HINT) -> None:
        super().__init__(reason, detail, hint)
        self.reason = reason
        self.detail = detail
        self.hint = hint


def check_length(length: int, unit: str = "characters") -> None:
    """Raise if a text is too long to be kept in memory.

    Args:
        length: length of the text in characters, or in tokens that have not been decoded.
        unit: unit of the length, for the message.

    Raises:
        MalformedError: the length is above `MAX_TEXT_LENGTH`.
    """
    if length > MAX_TEXT_LENGTH:
        raise MalformedError("too long", f"{length:,} {unit}, at most {MAX_TEXT_LENGTH:,} are supported")
