"""Digests of prepared text. Equal digests show that two folders contain the same token stream, without reading it.

The digests are computed from the manifest's entries of the shards, which are checked against the files when a run
starts. They do not include the folder's location, so that copied or remote data has the same digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from data_prep.manifest import DomainEntry, Manifest


@dataclass(frozen=True)
class DomainText:
    """Identification of the text of a domain in a split.

    Attributes:
        split: train, validation or test.
        domain: name of the domain.
        documents: number of documents.
        tokens: number of tokens, including end-of-document tokens.
        sha256: hexadecimal SHA-256 of the dtype and of the names, hashes and counts of the shards, in order.
    """

    split: str
    domain: str
    documents: int
    tokens: int
    sha256: str


def domain_texts(manifest: Manifest, split: str, domains: Iterable[str] | None = None) -> list[DomainText]:
    """Return the texts of a split's domains in the manifest's order, which is that of the token stream.

    Args:
        manifest: manifest of the folder.
        split: train, validation or test. The result is empty if the manifest has no such split.
        domains: names as in `Manifest.select`. None: all.

    Raises:
        UserError: the split exists, but lacks a domain.
    """
    if not manifest.domain_names(split):
        return []
    return [_domain_text(entry, manifest.dtype) for entry in manifest.select(split, domains)]


def text_digest(texts: Iterable[DomainText]) -> str:
    """Return the hexadecimal SHA-256 of several texts in order."""
    return digest([[text.split, text.domain, text.documents, text.tokens, text.sha256] for text in texts])


def digest(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a plain value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _domain_text(entry: DomainEntry, dtype: str) -> DomainText:
    shards = [
        [shard.file, shard.sha256, shard.index_sha256, shard.documents, shard.tokens, shard.bytes]
        for shard in entry.shards
    ]
    return DomainText(entry.split, entry.domain, entry.documents, entry.tokens, digest([dtype, shards]))
