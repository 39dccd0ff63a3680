"""Checks of a manifest's content before any file that it names is opened, fetched or removed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.manifest_entries import MANIFEST_NAME, DomainEntry, Manifest, ShardEntry, TokenizerEntry
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import check_relative_path

TOKEN_BYTES = {"uint16": 2, "uint32": 4}
MAX_VOCAB_SIZE = {"uint16": 2**16, "uint32": 2**31}
"""Maximum vocabulary size by dtype of the stored tokens. Token ids must also fit in int32 labels."""

INDEX_ROW_BYTES = 16
"""Number of bytes per document in an index: two int64 values."""

RESERVED_NAMES = (MANIFEST_NAME, ".locks", ".partial", ".work", ".begun.json", ".lock")
"""Names in a prepared folder, or in its cache, that a manifest's paths must not begin with."""

_HINT = "copy it again or prepare the data again"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_manifest(manifest: Manifest, where: str) -> None:
    """Check that paths stay inside the folder, and that sizes, counts and token ids are consistent.

    Args:
        manifest: manifest whose fields have the right types.
        where: location of the manifest, for messages.

    Raises:
        UserError: the manifest is inconsistent. The message contains the first problem and its location.
    """
    for location, problem in _find_problems(manifest, where):
        raise UserError(where, f"is damaged ({location}: {problem})", _HINT)


def _find_problems(manifest: Manifest, where: str) -> Iterator[tuple[str, str]]:
    locations = {_check_name(manifest.tokenizer.file, f"{where} (tokenizer.file)"): "tokenizer.file"}
    yield from _tokenizer_problems(manifest.tokenizer, manifest.dtype)
    keys: set[tuple[str, str]] = set()
    for number, entry in enumerate(manifest.domains):
        location = f"domains.{number}"
        if (entry.split, entry.domain) in keys:
            yield f"{location}.domain", f"{entry.domain} occurs twice in {entry.split}"
        keys.add((entry.split, entry.domain))
        yield from _domain_problems(entry, location)
        for index, shard in enumerate(entry.shards):
            shard_location = f"{location}.shards.{index}"
            for field in ("file", "index"):
                name = _check_name(getattr(shard, field), f"{where} ({shard_location}.{field})")
                if name in locations:
                    yield f"{shard_location}.{field}", f"{name} is also {locations[name]}"
                locations[name] = f"{shard_location}.{field}"
            yield from _shard_problems(shard, manifest.dtype, shard_location)


def _check_name(name: str, where: str) -> str:
    checked = check_relative_path(name, where)
    if checked.partition("/")[0] in RESERVED_NAMES:
        raise UserError(where, f"names {checked}, which is a reserved name", "use only data that you trust")
    return checked


def _tokenizer_problems(entry: TokenizerEntry, dtype: str) -> Iterator[tuple[str, str]]:
    if not _SHA256.fullmatch(entry.sha256):
        yield "tokenizer.sha256", f"{entry.sha256!r} is not a SHA-256 digest"
    if not 1 <= entry.vocab_size <= MAX_VOCAB_SIZE[dtype]:
        yield "tokenizer.vocab_size", f"{entry.vocab_size} does not fit {dtype}"
    if not 0 <= entry.eos_id < entry.vocab_size:
        yield "tokenizer.eos_id", f"{entry.eos_id} is not below vocab_size {entry.vocab_size}"


def _domain_problems(entry: DomainEntry, location: str) -> Iterator[tuple[str, str]]:
    for field in ("documents", "tokens"):
        stated, total = getattr(entry, field), sum(getattr(shard, field) for shard in entry.shards)
        if stated != total:
            yield f"{location}.{field}", f"{stated}, but its shards have {total}"


def _shard_problems(shard: ShardEntry, dtype: str, location: str) -> Iterator[tuple[str, str]]:
    for field in ("sha256", "index_sha256"):
        if not _SHA256.fullmatch(getattr(shard, field)):
            yield f"{location}.{field}", f"{getattr(shard, field)!r} is not a SHA-256 digest"
    if shard.bytes < shard.tokens * TOKEN_BYTES[dtype]:
        yield f"{location}.bytes", f"{shard.bytes} is too small for {shard.tokens} tokens of {dtype}"
    if shard.index_bytes < shard.documents * INDEX_ROW_BYTES:
        yield f"{location}.index_bytes", f"{shard.index_bytes} is too small for {shard.documents} documents"
