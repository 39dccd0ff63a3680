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
"""Non-negative integer up to 2**53, the limit that all JSON parsers represent exactly."""

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class TokenizerEntry:
    """Tokenizer that produced the tokens.

    Attributes:
        file: path of a tokenizer.json, a .tiktoken file or an RWKV vocabulary, relative to the manifest.
        sha256: SHA-256 of the file, hexadecimal.
        vocab_size: largest token id + 1.
        eos_token: token that ends every document.
        eos_id: id of `eos_token`.
        kind: format of the file.
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
    """Shard: a tar file and its index.

    Attributes:
        file: path of the tar, relative to the manifest.
        index: path of the index, relative to the manifest. The index is an int64 array [documents, 2]. A row contains
            the byte offset of a document's tokens in the tar, and the number of tokens.
        documents: number of documents.
        tokens: number of tokens, including end-of-document tokens.
        bytes: size of the tar in bytes.
        index_bytes: size of the index in bytes.
        sha256: SHA-256 of the tar, hexadecimal.
        index_sha256: SHA-256 of the index, hexadecimal.
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
    """Documents of a domain in a split.

    Attributes:
        split: train, validation or test.
        domain: name of the domain.
        documents: number of documents.
        tokens: number of tokens, including end-of-document tokens.
        characters: number of Unicode characters of the text.
        bytes: number of UTF-8 bytes of the text, for bits per byte.
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
    """Number of malformed records that were skipped, by input file and reason."""

    file: str
    reason: str
    records: Count


@dataclass(frozen=True, config=_STRICT)
class CountEntry:
    """Number of documents of a split that were dropped or cleaned for the same reason.

    Training documents that were dropped before the validation split was held out count as train.
    """

    split: Literal["train", "validation", "test"]
    reason: str
    documents: Count


@dataclass(frozen=True, config=_STRICT)
class UnusedEntry:
    """Number of well-formed documents that no split uses, by domain and reason."""

    domain: str
    reason: str
    documents: Count


@dataclass(frozen=True, config=_STRICT)
class Manifest:
    """Manifest of a prepared folder.

    Attributes:
        version: version of the format.
        tokenizer: tokenizer that produced the tokens.
        dtype: dtype of the stored tokens, uint16 or uint32, little-endian.
        domains: domains by split, in the order train, validation, test.
        skipped: counts of skipped malformed records.
        duplicates: number of documents dropped as exact or near-duplicates.
        left_out: counts of dropped well-formed documents, including duplicates.
        cleaned: counts of documents changed by cleaning. A document with several changes counts once for each.
        unused: counts of well-formed documents that no split uses, because of their domain or their folder. The counts
            in `domains`, `skipped`, `left_out` and `unused` add up to the number of input records.
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
            split: train, validation or test. None: all.
            domains: names in SlimPajama's long or short form, in upper or lower case. None: all.

        Raises:
            UserError: a domain or the split does not exist.
        """
        entries = [entry for entry in self.domains if split in (None, entry.split)]
        present = list(dict.fromkeys(entry.domain for entry in entries))
        scope = f"the {split} split" if split else "the data"
        if not entries:
            splits = ", ".join(dict.fromkeys(entry.split for entry in self.domains)) or "none"
            raise UserError(MANIFEST_NAME, f"{scope} is empty", f"choose from the existing splits: {splits}")
        selected = set()
        for name in present if domains is None else domains:
            match = match_domain(name, present)
            if match is None:
                raise UserError(MANIFEST_NAME, f"no domain {name} in {scope}", f"choose from: {', '.join(present)}")
            selected.add(match)
        return [entry for entry in entries if entry.domain in selected]


def match_domain(name: str, present: Iterable[str]) -> str | None:
    """Return the domain in `present` that equals `name` in the long or short form, ignoring case; None if none does."""
    return next((candidate for candidate in present if domain_key(candidate) == domain_key(name)), None)
