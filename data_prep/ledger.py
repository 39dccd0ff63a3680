"""Which documents of a task were left out or changed, and why: counts for the manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from datatrove.data import Document

MOST_UNUSED = 500
"""Domains that are counted by name: records may name any number of them, such as one each."""

FURTHER = "(further domains)"


def count_unused(counts: Counter[tuple[str, str]], domain: str, reason: str, documents: int = 1) -> None:
    """Count documents that no split takes, by domain and reason; domains beyond `MOST_UNUSED` together."""
    room = MOST_UNUSED + ((FURTHER, reason) in counts)
    is_named = (domain, reason) in counts or len(counts) < room
    counts[domain if is_named else FURTHER, reason] += documents


@dataclass
class Ledger:
    """Counts of documents; steps of one pipeline share one, and each task has its own copy.

    Attributes:
        left_out: those that were dropped, by split and reason.
        changed: those that cleaning changed, by split and reason; one with several reasons is counted under each.
        unused: those that no split takes, by domain and reason; see `count_unused`.
    """

    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    changed: Counter[tuple[str, str]] = field(default_factory=Counter)
    unused: Counter[tuple[str, str]] = field(default_factory=Counter)


class CountLeftOut:
    """Stands where datatrove's filters take a writer for the documents that they drop, and only counts those.

    Args:
        ledger: told of them.
        reason: why they go; `{}` in it is replaced by the filter's own reason.
    """

    def __init__(self, ledger: Ledger, reason: str) -> None:
        self.ledger = ledger
        self.reason = reason

    def __enter__(self) -> CountLeftOut:
        """Nothing is opened."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is closed."""

    def write(self, document: Document, rank: int = 0) -> None:
        """Count a document that goes."""
        reason = self.reason.format(document.metadata.get("filter_reason", ""))
        self.ledger.left_out[document.metadata["split"], reason] += 1
