"""Digests of prepared text: whether two folders hold the same tokens in the same order, without reading them.

They are made of what the manifest says of the shards, which is compared with the files when a run starts. The folder's
place is no part of them: data that was copied elsewhere, or lies at an address, has the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from data_prep.manifest import DomainEntry, Manifest


@dataclass(frozen=True)
class Text:
    """One domain in one split.

    Attributes:
        split: train, validation or test.
        domain: its name.
        documents: number of documents.
        tokens: number of tokens, end-of-document tokens included.
        sha256: of the names, hashes and counts of its shards, in their order; hexadecimal.
    """

    split: str
    domain: str
    documents: int
    tokens: int
    sha256: str


def texts_of(manifest: Manifest, split: str, domains: Iterable[str] | None = None) -> list[Text]:
    """What a split holds of some domains, in the manifest's order, which is that of the token stream.

    Args:
        manifest: of the folder.
        split: train, validation or test; one that the folder has not is empty.
        domains: names as `Manifest.select` takes them; None: all.

    Raises:
        UserError: the split is there, and a domain is not in it.
    """
    if not manifest.domain_names(split):
        return []
    return [_text(entry, manifest.dtype) for entry in manifest.select(split, domains)]


def text_digest(texts: Iterable[Text]) -> str:
    """SHA-256, hexadecimal, of several texts in their order: equal where the token streams are."""
    return digest([[one.split, one.domain, one.documents, one.tokens, one.sha256] for one in texts])


def digest(value: Any) -> str:
    """SHA-256, hexadecimal, of a plain value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _text(entry: DomainEntry, dtype: str) -> Text:
    shards = [
        [shard.file, shard.sha256, shard.index_sha256, shard.documents, shard.tokens, shard.bytes]
        for shard in entry.shards
    ]
    return Text(entry.split, entry.domain, entry.documents, entry.tokens, digest([dtype, shards]))
