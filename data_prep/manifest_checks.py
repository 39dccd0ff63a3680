"""Checks of a manifest's content before any file that it names is opened, fetched or removed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.manifest_entries import MANIFEST_NAME, DomainEntry, Manifest, ShardEntry, TokenizerEntry
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import check_relative_path

TOKEN_BYTES = {"uint16": 2, "uint32": 4}
LARGEST_VOCABULARY = {"uint16": 2**16, "uint32": 2**31}
"""Largest vocabulary by type of the stored tokens; ids must also fit in int32 labels."""

INDEX_ROW_BYTES = 16
"""Bytes per document in an index: two int64."""

RESERVED = (MANIFEST_NAME, ".locks", ".partial", ".work", ".begun.json", ".lock")
"""First path components that a manifest's folder, or a cache of one, reserves."""

_AGAIN = "copy it again or prepare the data again"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_manifest(manifest: Manifest, where: str) -> None:
    """Check what the types do not: names stay inside the folder, sizes and counts are consistent.

    Args:
        manifest: the parsed manifest.
        where: its file, for messages.

    Raises:
        UserError: the first error, with its location in the manifest.
    """
    for place, problem in _problems(manifest, where):
        raise UserError(where, f"is damaged ({place}: {problem})", _AGAIN)


def _problems(manifest: Manifest, where: str) -> Iterator[tuple[str, str]]:
    names = {_checked_name(manifest.tokenizer.file, f"{where} (tokenizer.file)"): "tokenizer.file"}
    yield from _of_tokenizer(manifest.tokenizer, manifest.dtype)
    seen: set[tuple[str, str]] = set()
    for number, entry in enumerate(manifest.domains):
        place = f"domains.{number}"
        if (entry.split, entry.domain) in seen:
            yield f"{place}.domain", f"{entry.domain} occurs twice in {entry.split}"
        seen.add((entry.split, entry.domain))
        yield from _of_domain(entry, place)
        for index, shard in enumerate(entry.shards):
            inside = f"{place}.shards.{index}"
            for field in ("file", "index"):
                name = _checked_name(getattr(shard, field), f"{where} ({inside}.{field})")
                if name in names:
                    yield f"{inside}.{field}", f"{name} is also {names[name]}"
                names[name] = f"{inside}.{field}"
            yield from _of_shard(shard, manifest.dtype, inside)


def _checked_name(name: str, where: str) -> str:
    checked = check_relative_path(name, where)
    if checked.partition("/")[0] in RESERVED:
        raise UserError(where, f"names {checked}, which is a reserved name", "use only data that you trust")
    return checked


def _of_tokenizer(entry: TokenizerEntry, dtype: str) -> Iterator[tuple[str, str]]:
    if not _SHA256.fullmatch(entry.sha256):
        yield "tokenizer.sha256", f"{entry.sha256!r} is not a SHA-256 digest"
    if not 1 <= entry.vocab_size <= LARGEST_VOCABULARY[dtype]:
        yield "tokenizer.vocab_size", f"{entry.vocab_size} does not fit {dtype}"
    if not 0 <= entry.eos_id < entry.vocab_size:
        yield "tokenizer.eos_id", f"{entry.eos_id} is not below vocab_size {entry.vocab_size}"


def _of_domain(entry: DomainEntry, place: str) -> Iterator[tuple[str, str]]:
    for field in ("documents", "tokens"):
        stated, found = getattr(entry, field), sum(getattr(shard, field) for shard in entry.shards)
        if stated != found:
            yield f"{place}.{field}", f"{stated}, but its shards have {found}"


def _of_shard(shard: ShardEntry, dtype: str, place: str) -> Iterator[tuple[str, str]]:
    for field in ("sha256", "index_sha256"):
        if not _SHA256.fullmatch(getattr(shard, field)):
            yield f"{place}.{field}", f"{getattr(shard, field)!r} is not a SHA-256 digest"
    if shard.bytes < shard.tokens * TOKEN_BYTES[dtype]:
        yield f"{place}.bytes", f"{shard.bytes} is too small for {shard.tokens} tokens of {dtype}"
    if shard.index_bytes < shard.documents * INDEX_ROW_BYTES:
        yield f"{place}.index_bytes", f"{shard.index_bytes} is too small for {shard.documents} documents"
