"""The manifest: what a prepared folder holds and what it was made from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from data_prep.documents import domain_key
from data_prep.storage import sha256_of
from megatron_ext.errors import UserError
from megatron_ext.files import write_whole

MANIFEST_NAME = "manifest.json"
VERSION = 1

TokenizerKind = Literal["huggingface", "tiktoken", "rwkv"]
VerifyMode = Literal["sha256", "size"]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class TokenizerEntry:
    """The tokenizer that made the tokens.

    Attributes:
        file: its file (a tokenizer.json, a .tiktoken file, an RWKV vocabulary), relative to the manifest.
        sha256: of that file.
        vocab_size: largest id + 1.
        eos_token: token that ends every document.
        eos_id: its id.
        kind: what reads the file.
        pattern: regular expression by which text is cut before merging, where the file does not say (tiktoken).
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
        documents: documents in it.
        tokens: tokens in it, end-of-document tokens included.
        bytes: size of the tar.
        index_bytes: size of the index file.
        sha256: of the tar.
        index_sha256: of the index file.
    """

    file: str
    index: str
    documents: int
    tokens: int
    bytes: int
    index_bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True, config=_STRICT)
class DomainEntry:
    """One domain in one split.

    Attributes:
        split: train, validation or test.
        domain: name of the domain.
        documents: number of documents.
        tokens: number of tokens, end-of-document tokens included.
        characters: Unicode characters of the text.
        bytes: UTF-8 bytes of the text (for bits per byte).
        shards: where the tokens are, in order.
    """

    split: Literal["train", "validation", "test"]
    domain: str
    documents: int
    tokens: int
    characters: int
    bytes: int
    shards: list[ShardEntry]


@dataclass(frozen=True, config=_STRICT)
class SkippedEntry:
    """Malformed records that were passed over, by input file and reason."""

    file: str
    reason: str
    records: int


@dataclass(frozen=True, config=_STRICT)
class CountEntry:
    """Documents of a split, by a reason: why they were left out, or what of them was cleaned.

    Those that were left out before training documents were held out for validation count as train.
    """

    split: Literal["train", "validation", "test"]
    reason: str
    documents: int


@dataclass(frozen=True, config=_STRICT)
class UnusedEntry:
    """Well-formed documents that no split takes, by domain and reason."""

    domain: str
    reason: str
    documents: int


@dataclass(frozen=True, config=_STRICT)
class Manifest:
    """A prepared folder.

    Attributes:
        version: of this form.
        tokenizer: what made the tokens.
        dtype: type of the stored tokens: uint16 or uint32, little-endian.
        domains: what there is, train before validation before test.
        skipped: malformed records passed over.
        duplicates: documents left out as exact or near-duplicates.
        left_out: well-formed documents left out, duplicates among them.
        cleaned: documents that cleaning changed; one with several reasons is counted under each.
        unused: well-formed documents of domains, or of folders for them, that no split takes. With the documents of
            `domains`, `skipped` and `left_out` they are all records of the input.
        options: what the folder was prepared with.
        provenance: what the documents come from.
    """

    version: int
    tokenizer: TokenizerEntry
    dtype: Literal["uint16", "uint32"]
    domains: list[DomainEntry]
    skipped: list[SkippedEntry] = field(default_factory=list)
    duplicates: int = 0
    left_out: list[CountEntry] = field(default_factory=list)
    cleaned: list[CountEntry] = field(default_factory=list)
    unused: list[UnusedEntry] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def domain_names(self, split: str) -> list[str]:
        """Names of the domains of a split, in the manifest's order."""
        return [entry.domain for entry in self.domains if entry.split == split]

    def select(self, split: str | None = None, domains: Iterable[str] | None = None) -> list[DomainEntry]:
        """Entries of a split and of some domains, in the manifest's order whatever the order of the names.

        Args:
            split: train, validation or test; None: all.
            domains: names in SlimPajama's long form or the short one, in any case; None: all.

        Raises:
            UserError: a domain, or the split, is not there.
        """
        entries = [entry for entry in self.domains if split in (None, entry.split)]
        present = list(dict.fromkeys(entry.domain for entry in entries))
        place = f"the {split} split" if split else "the data"
        if not entries:
            splits = ", ".join(dict.fromkeys(entry.split for entry in self.domains)) or "none"
            raise UserError(MANIFEST_NAME, f"{place} is empty", f"use a split that is there: {splits}")
        wanted = set()
        for name in present if domains is None else domains:
            match = match_domain(name, present)
            if match is None:
                raise UserError(MANIFEST_NAME, f"no domain {name} in {place}", f"choose from: {', '.join(present)}")
            wanted.add(match)
        return [entry for entry in entries if entry.domain in wanted]


def match_domain(name: str, present: Iterable[str]) -> str | None:
    """The domain of `present` that a user's name means, in either form and any case; None if there is none."""
    return next((known for known in present if domain_key(known) == domain_key(name)), None)


def save_manifest(root: Path, manifest: Manifest) -> None:
    """Write manifest.json whole or not at all. Called last: a folder without one is unfinished."""
    content = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    write_whole(root / MANIFEST_NAME, content.encode())


def load_manifest(root: Path) -> Manifest:
    """Read the manifest of a prepared folder.

    Raises:
        UserError: there is none, it is damaged, or of another version.
    """
    path = root / MANIFEST_NAME
    again = "prepare the data again with `selectron prepare`"
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", again) from None
    except ValueError as error:
        raise UserError(str(path), f"is damaged ({error})", again) from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise UserError(str(path), f"is of version {version}, this program reads version {VERSION}", again)
    try:
        return TypeAdapter(Manifest).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(str(path), f"is damaged ({place}: {first['msg']})", again) from None


def verify_shard(root: Path, shard: ShardEntry, mode: VerifyMode) -> None:
    """Check one shard and its index against the manifest.

    Args:
        root: folder of the manifest.
        shard: what the manifest says.
        mode: `size` compares sizes alone; `sha256` reads the files whole.

    Raises:
        UserError: a file is missing, of another size, or has other content; the file is named.
    """
    _verify_file(root / shard.file, shard.bytes, shard.sha256, mode)
    _verify_file(root / shard.index, shard.index_bytes, shard.index_sha256, mode)


def _verify_file(path: Path, size: int, sha256: str, mode: VerifyMode) -> None:
    mend = "copy it again or prepare the data again"
    if not path.is_file():
        raise UserError(str(path), "is missing", mend)
    actual = path.stat().st_size
    if actual != size:
        state = "truncated" if actual < size else "too long"
        raise UserError(str(path), f"is {state}: expected {size} bytes, found {actual}", mend)
    if mode == "sha256" and (found := sha256_of(path)) != sha256:
        raise UserError(str(path), f"sha256 differs: expected {sha256}, found {found}", mend)


def verify_tokenizer(root: Path, manifest: Manifest, tokenizer: Path | None = None) -> Path:
    """Check that a tokenizer.json is the one the data was made with.

    Args:
        root: folder of the manifest.
        manifest: what is in it.
        tokenizer: the file to check; None: the one kept beside the manifest.

    Returns:
        The file that was checked.

    Raises:
        UserError: it is missing or another one; both files are named.
    """
    path = tokenizer if tokenizer is not None else root / manifest.tokenizer.file
    manifest_path = root / MANIFEST_NAME
    if not path.is_file():
        raise UserError(str(path), f"is missing (the tokenizer of {manifest_path})", "give its path or copy it there")
    found = sha256_of(path)
    if found != manifest.tokenizer.sha256:
        problem = f"is not the tokenizer of {manifest_path}: sha256 {found[:12]}, expected"
        mend = f"use {root / manifest.tokenizer.file} or prepare the data again"
        raise UserError(str(path), f"{problem} {manifest.tokenizer.sha256[:12]}", mend)
    return path
