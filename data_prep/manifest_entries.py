"""Entries of a manifest (tokenizer, shards, domains, counts), and the manifest itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from data_prep.documents import domain_key
from megatron_ext.utils.errors import UserError

MANIFEST_NAME = "manifest.json"
TokenizerKind = Literal["huggingface", "tiktoken", "rwkv"]
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A count; limited to the integers that JSON represents exactly in other programs."""

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class TokenizerEntry:
    """The tokenizer that made the tokens.

    Attributes:
        file: its file (a tokenizer.json, a .tiktoken file or an RWKV vocabulary), relative to the manifest.
        sha256: hash of that file.
        vocab_size: largest id + 1.
        eos_token: token that ends every document.
        eos_id: id of that token.
        kind: library that reads the file.
        pattern: regular expression that splits text before merging, if the file does not contain it (tiktoken).
    """

    file: str
    sha256: str
    vocab_size: int
    eos_token: str
    eos_id: int
    kind: TokenizerKind = "huggingface"
    pattern: str = ""


@dataclass(frozen=True, config=_STRICT)
class ShardEntry:
    """One tar file and its index.

    Attributes:
        file: the tar, relative to the manifest.
        index: int64 array [documents, 2] beside it: byte offset of a document's tokens in the tar, number of tokens.
        documents: number of documents.
        tokens: number of tokens, including end-of-document tokens.
        bytes: size of the tar.
        index_bytes: size of the index file.
        sha256: hash of the tar.
        index_sha256: hash of the index file.
    """

    file: str
    index: str
    documents: Count
    tokens: Count
    bytes: Count
    index_bytes: Count
    sha256: str
    index_sha256: str


@dataclass(frozen=True, config=_STRICT)
class DomainEntry:
    """One domain in one split.

    Attributes:
        split: train, validation or test.
        domain: name of the domain.
        documents: number of documents.
        tokens: number of tokens, including end-of-document tokens.
        characters: Unicode characters of the text.
        bytes: UTF-8 bytes of the text (for bits per byte).
        shards: shards that contain the tokens, in order.
    """

    split: Literal["train", "validation", "test"]
    domain: str
    documents: Count
    tokens: Count
    characters: Count
    bytes: Count
    shards: list[ShardEntry]


@dataclass(frozen=True, config=_STRICT)
class SkippedEntry:
    """Skipped malformed records, by input file and reason."""

    file: str
    reason: str
    records: Count


@dataclass(frozen=True, config=_STRICT)
class CountEntry:
    """Documents of a split by reason: why they were dropped, or how they were cleaned.

    Training documents that were dropped before the validation split was held out count as train.
    """

    split: Literal["train", "validation", "test"]
    reason: str
    documents: Count


@dataclass(frozen=True, config=_STRICT)
class UnusedEntry:
    """Well-formed documents that no split uses, by domain and reason."""

    domain: str
    reason: str
    documents: Count


@dataclass(frozen=True, config=_STRICT)
class Manifest:
    """Manifest of a prepared folder.

    Attributes:
        version: version of the format.
        tokenizer: the tokenizer of the data.
        dtype: type of the stored tokens: uint16 or uint32, little-endian.
        domains: domains by split, train before validation before test.
        skipped: skipped malformed records.
        duplicates: number of documents dropped as exact or near-duplicates.
        left_out: dropped well-formed documents, including duplicates.
        cleaned: documents changed by cleaning; one with several reasons is counted for each.
        unused: well-formed documents of domains, or of folders for them, that no split uses. Together with the
            documents of `domains`, `skipped` and `left_out`, they are all records of the input.
        options: options of the preparation.
        provenance: source of the documents.
    """

    version: int
    tokenizer: TokenizerEntry
    dtype: Literal["uint16", "uint32"]
    domains: list[DomainEntry]
    skipped: list[SkippedEntry] = field(default_factory=list)
    duplicates: Count = 0
    left_out: list[CountEntry] = field(default_factory=list)
    cleaned: list[CountEntry] = field(default_factory=list)
    unused: list[UnusedEntry] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def domain_names(self, split: str) -> list[str]:
        """Return the names of a split's domains, in the manifest's order."""
        return [entry.domain for entry in self.domains if entry.split == split]

    def select(self, split: str | None = None, domains: Iterable[str] | None = None) -> list[DomainEntry]:
        """Return the entries of a split and of some domains, in the manifest's order.

        Args:
            split: train, validation or test; None for all.
            domains: names in SlimPajama's long or short form, in any case; None for all.

        Raises:
            UserError: a domain or the split does not exist.
        """
        entries = [entry for entry in self.domains if split in (None, entry.split)]
        present = list(dict.fromkeys(entry.domain for entry in entries))
        place = f"the {split} split" if split else "the data"
        if not entries:
            splits = ", ".join(dict.fromkeys(entry.split for entry in self.domains)) or "none"
            raise UserError(MANIFEST_NAME, f"{place} is empty", f"choose from the existing splits: {splits}")
        wanted = set()
        for name in present if domains is None else domains:
            match = match_domain(name, present)
            if match is None:
                raise UserError(MANIFEST_NAME, f"no domain {name} in {place}", f"choose from: {', '.join(present)}")
            wanted.add(match)
        return [entry for entry in entries if entry.domain in wanted]


def match_domain(name: str, present: Iterable[str]) -> str | None:
    """Return the domain of `present` that a user's name means, in either form and any case; None if there is none."""
    return next((known for known in present if domain_key(known) == domain_key(name)), None)
