"""Which split a document belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from data_prep.documents import domain_key

NO_SIDE = "neither trained nor tested on"


@dataclass(frozen=True)
class SplitPlan:
    """Which split a document belongs to.

    Domains are known by any of their spellings, as `match_domain` knows them.

    Attributes:
        train: training domains.
        test: test domains.
        folders: splits that the input's folders give.
        validation_fraction: share of the training documents held out by hash, where no folder says.
        optional: domains of either that the input may lack.
    """

    train: frozenset[str]
    test: frozenset[str]
    folders: frozenset[str]
    validation_fraction: float
    optional: frozenset[str] = frozenset()

    def side_of(self, domain: str, folder: str | None) -> str | None:
        """What is known of a document's split before its text is: `train` is where some may still be held out.

        Of a corpus split by folders, test domains are read from `test` alone (without it: from `validation`). Documents
        of training domains in `test` are test documents in domain.

        Args:
            domain: of the document.
            folder: split whose folder it lies in; None where folders do not give the split.

        Returns:
            train, validation or test; None: it is not used.
        """
        domain = self.own_name(domain)
        if domain in self.test:
            given = next((name for name in ("test", "validation") if name in self.folders), None)
            return "test" if given is None or folder == given else None
        if domain not in self.train:
            return None
        return folder or "train"

    def why_unused(self, domain: str, folder: str | None) -> str:
        """Why `side_of` says None of a document."""
        return f"tested on, but in the folder {folder}" if self.own_name(domain) in self.test else NO_SIDE

    def own_name(self, domain: str) -> str:
        """The one spelling of a domain that the splits use; of a domain that they do not: the one given."""
        return self._own_names.get(domain_key(domain), domain)

    @cached_property
    def _own_names(self) -> dict[str, str]:
        return {domain_key(name): name for name in self.train | self.test}

    def split_of(self, text: str, domain: str, folder: str | None) -> str | None:
        """The split of a document; see `side_of`. The hash is of the text: equal texts cannot stand on both sides."""
        side = self.side_of(domain, folder)
        if side != "train" or (folder == "train" and "validation" in self.folders):
            return side
        return "validation" if fingerprint(text) < self.validation_fraction * 2.0**64 else "train"

    @property
    def has_test(self) -> bool:
        """Whether there may be test documents."""
        return bool(self.test) or "test" in self.folders


def fingerprint(text: str) -> int:
    """Eight bytes of hash of a text, as an unsigned integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
