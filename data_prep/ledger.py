"""Which documents of a task were left out or changed, and why: counts for the manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from datatrove.data import Document


@dataclass
class Ledger:
    """Counts of documents; steps of one pipeline share one, and each task has its own copy.

    Attributes:
        left_out: those that were dropped, by split and reason.
        changed: those that cleaning changed, by split and reason; one with several reasons is counted under each.
        unused: those that no split takes, by domain and reason.
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
