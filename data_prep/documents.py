"""Documents, what is done about malformed ones, and what a corpus of them offers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from megatron_ext.credentials import redacted
from megatron_ext.errors import UserError
from megatron_ext.printable import printable

SPLITS = ("train", "validation", "test")

LONGEST_TEXT = 16_000_000
"""Characters of a document, or tokens where it comes as these.

A longer one is malformed: a worker holds a whole one, and its memory is bounded.
"""

LONGEST_RECORD = 64 << 20
"""Bytes of a line, a tar member or a text file that are read into memory; JSON may spell a letter with six."""

REPAIR = "repair it"

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
        changes: what its reader took from the text, as reasons of the counts in the manifest's `cleaned`.
    """

    id: str
    text: str
    domain: str
    source: str
    folder: str | None = None
    changes: tuple[str, ...] = ()


@dataclass
class Problems:
    """What to do about malformed records, and the count of those passed over.

    Attributes:
        on_error: `stop` raises at the first one, `skip` counts.
        otherwise: what a user who is stopped can do besides mending the record.
        counts: number of skipped records by (file, reason).
    """

    on_error: Literal["stop", "skip"] = "stop"
    otherwise: str = "pass --on-error skip"
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def report(self, file: str, line: int | str | None, reason: str, detail: str = "", mend: str = REPAIR) -> None:
        """Count a malformed record, or stop.

        Args:
            file: input file; bytes of its name that are no text count as their escapes.
            line: line inside it, from 1, or another place; None for a whole file.
            reason: kind of defect; skipped records are counted by it.
            detail: more about this one record.
            mend: what can be done besides skipping it.

        Raises:
            UserError: `on_error` is `stop`.
        """
        if self.on_error == "stop":
            where = file if line is None else f"{file}:{line}"
            problem = f"{reason} ({detail})" if detail else reason
            raise UserError(where, " ".join(problem.split()), f"{mend} or {self.otherwise}")
        self.counts[printable(redacted(file)), reason] += 1


class Corpus(Protocol):
    """A re-readable collection of documents in a fixed order, made of units that can be read one by one."""

    @property
    def folders(self) -> frozenset[str]:
        """Splits that the input's own folders give; empty where a hash decides."""
        ...

    @property
    def units(self) -> int:
        """Number of units: the input's files, in order."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes that a whole pass reports to `advance`."""
        ...

    def read(self, unit: int, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Documents of one unit, in the same order on every pass."""
        ...

    def documents(self, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Documents of all units, one unit after the other."""
        ...

    def provenance(self) -> dict[str, Any]:
        """What the documents come from, for the manifest."""
        ...

    def identity(self) -> str:
        """Digest that changes when the input does: a preparation that was stopped goes on over the same input only."""
        ...


def short_domain(name: str) -> str:
    """Domain name without SlimPajama's prefix: `RedPajamaC4` -> `C4`."""
    return name[len("redpajama") :] if name.lower().startswith("redpajama") and len(name) > len("redpajama") else name


def domain_key(name: str) -> str:
    """What two names of one domain have in common: neither its form, SlimPajama's or the short one, nor its case."""
    return short_domain(name).casefold()


class MalformedError(ValueError):
    """A record that is no document: a kind of defect, the detail of this one, and what can be done besides skipping."""

    def __init__(self, reason: str, detail: str = "", mend: str = REPAIR) -> None:
        super().__init__(reason, detail, mend)
        self.reason = reason
        self.detail = detail
        self.mend = mend


def check_length(length: int, unit: str = "characters") -> None:
    """Refuse a text that is too long to be held whole.

    Args:
        length: of the text, in characters, or in tokens that have not been decoded.
        unit: which of them, for the message.

    Raises:
        MalformedError: it is above `LONGEST_TEXT`.
    """
    if length > LONGEST_TEXT:
        raise MalformedError("too long", f"{length:,} {unit}, at most {LONGEST_TEXT:,} are taken")
