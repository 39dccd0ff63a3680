"""Which split a document belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitPlan:
    """Which split a document belongs to.

    Attributes:
        train: training domains.
        test: test domains.
        folders: splits that the input's folders give.
        validation_fraction: share of the training documents held out by hash, where no folder says.
    """

    train: frozenset[str]
    test: frozenset[str]
    folders: frozenset[str]
    validation_fraction: float

    def split_of(self, text: str, domain: str, folder: str | None) -> str | None:
        """The split of a document with this text, of this domain, in the folder of this split; None: it is not used.

        Of a corpus split by folders, test domains are read from `test` alone (without it: from `validation`), training
        domains never from `test`. The hash is of the text, so that equal texts cannot stand on both sides.
        """
        if domain in self.test:
            given = next((name for name in ("test", "validation") if name in self.folders), None)
            return "test" if given is None or folder == given else None
        if domain not in self.train or folder == "test":
            return None
        if folder == "validation" or (folder == "train" and "validation" in self.folders):
            return folder
        return "validation" if fingerprint(text) < self.validation_fraction * 2.0**64 else "train"


def fingerprint(text: str) -> int:
    """Eight bytes of hash of a text, as an unsigned integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
