"""Counts of a task's dropped and changed documents by reason, for the manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from datatrove.data import Document

MAX_UNUSED_DOMAINS = 500
"""Maximum number of domains that are counted by name; records may name arbitrarily many."""

OTHER_DOMAINS = "(further domains)"


def count_unused(counts: Counter[tuple[str, str]], domain: str, reason: str, documents: int = 1) -> None:
    """Count documents that no split uses, by domain and reason.

    Domains beyond the first `MAX_UNUSED_DOMAINS` entries are counted together as `OTHER_DOMAINS`.
    """
    max_entries = MAX_UNUSED_DOMAINS + ((OTHER_DOMAINS, reason) in counts)
    is_named = (domain, reason) in counts or len(counts) < max_entries
    counts[domain if is_named else OTHER_DOMAINS, reason] += documents


@dataclass
class Ledger:
    """Counts of documents. The steps of a pipeline share one ledger, and each task has its own copy.

    Attributes:
        left_out: dropped documents by split and reason.
        changed: documents changed by cleaning, by split and reason. A document counts once for each of its reasons.
        unused: documents that no split uses, by domain and reason; see `count_unused`.
    """

    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    changed: Counter[tuple[str, str]] = field(default_factory=Counter)
    unused: Counter[tuple[str, str]] = field(default_factory=Counter)


class DropCounter:
    """Counter of dropped documents, with the interface of the writer that datatrove's filters accept for them.

    Args:
        ledger: receives the counts.
        reason: reason for dropping; `{}` in it is replaced by the filter's own reason.
    """

    def __init__(self, ledger: Ledger, reason: str) -> None:
        self.ledger = ledger
        self.reason = reason

    def __enter__(self) -> DropCounter:
        """Return the counter; there is nothing to open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing; there is nothing to close."""

    def write(self, document: Document, rank: int = 0) -> None:
        """Count a dropped document."""
        reason = self.reason.format(document.metadata.get("filter_reason", ""))
        self.ledger.left_out[document.metadata["split"], reason] += 1
