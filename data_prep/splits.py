"""Assignment of documents to splits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from data_prep.documents import domain_key

UNUSED_REASON = "neither trained nor tested on"


@dataclass(frozen=True)
class SplitPlan:
    """Assignment of documents to splits.

    Domains match in any of their spellings, as in `match_domain`.

    Attributes:
        train: training domains.
        test: test domains.
        folders: splits that have their own folder in the input.
        validation_fraction: fraction of the training documents that is held out for validation, chosen by hash, if no
            folder determines the split.
        optional: training or test domains that the input may lack.
    """

    train: frozenset[str]
    test: frozenset[str]
    folders: frozenset[str]
    validation_fraction: float
    optional: frozenset[str] = frozenset()

    def split_without_text(self, domain: str, folder: str | None) -> str | None:
        """Return the split of a document as far as it is known without its text.

        If the result is `train`, the document may still be held out for validation. If folders determine the splits,
        documents of test domains are only taken from the folder `test`, or from `validation` if there is no folder
        `test`. Documents of training domains in the folder `test` are in-domain test documents.

        Args:
            domain: domain of the document.
            folder: split whose folder contains the document; None if folders do not determine the split.

        Returns:
            train, validation or test; None if the document is not used.
        """
        domain = self.canonical_name(domain)
        if domain in self.test:
            test_folder = next((name for name in ("test", "validation") if name in self.folders), None)
            return "test" if test_folder is None or folder == test_folder else None
        if domain not in self.train:
            return None
        return folder or "train"

    def unused_reason(self, domain: str, folder: str | None) -> str:
        """Return the reason why `split_without_text` returns None for a document."""
        return f"tested on, but in the folder {folder}" if self.canonical_name(domain) in self.test else UNUSED_REASON

    def canonical_name(self, domain: str) -> str:
        """Return the plan's spelling of a domain. A domain that is not in the plan keeps its spelling."""
        return self._canonical_names.get(domain_key(domain), domain)

    @cached_property
    def _canonical_names(self) -> dict[str, str]:
        return {domain_key(name): name for name in self.train | self.test}

    def assign_split(self, text: str, domain: str, folder: str | None) -> str | None:
        """Return the split of a document; see `split_without_text`. A hash of the text selects validation documents."""
        split = self.split_without_text(domain, folder)
        if split != "train" or (folder == "train" and "validation" in self.folders):
            return split
        return "validation" if fingerprint(text) < self.validation_fraction * 2.0**64 else "train"

    @property
    def has_test(self) -> bool:
        """True if there may be test documents."""
        return bool(self.test) or "test" in self.folders


def fingerprint(text: str) -> int:
    """Return an 8-byte hash of a text as an unsigned integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
