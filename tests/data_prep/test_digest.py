"""Digests of prepared text: equal for equal tokens in any location, and different for others."""

import shutil
from dataclasses import replace

from data_prep.digest import domain_texts, text_digest
from data_prep.manifest import DomainEntry, Manifest, ShardEntry, TokenizerEntry, load_manifest, save_manifest


def shard(number: int, **other) -> ShardEntry:
    entry = ShardEntry(f"{number}.tar", f"{number}.index.npy", 2, 9, 10240, 160, f"{number}" * 64, "b" * 64)
    return replace(entry, **other)


def manifest(*shards: ShardEntry, dtype="uint16", domain="C4") -> Manifest:
    entries = [
        DomainEntry(split, name, 2 * len(shards), 9 * len(shards), 30, 31, list(shards))
        for split, name in (("train", domain), ("train", "Book"), ("test", "ArXiv"))
    ]
    return Manifest(1, TokenizerEntry("tokenizer.json", "c" * 64, 300, "</s>", 2), dtype, entries)


def digest_of(one: Manifest, split="train", domains=None) -> str:
    return text_digest(domain_texts(one, split, domains))


def test_equal_text_in_another_folder(tmp_path):
    one = manifest(shard(1))
    for number, entry in enumerate(one.domains):  # shards with distinct files
        entry.shards[:] = [shard(1, file=f"{number}.tar", index=f"{number}.index.npy")]
    save_manifest(tmp_path, one)
    shutil.copytree(tmp_path, tmp_path / "elsewhere")
    assert digest_of(load_manifest(tmp_path / "elsewhere")) == digest_of(one)


def test_digest_depends_on_the_token_stream():
    base = digest_of(manifest(shard(1), shard(2)))
    others = [
        manifest(shard(2), shard(1)),
        manifest(shard(1)),
        manifest(shard(1), shard(2, sha256="9" * 64)),
        manifest(shard(1), shard(2, index_sha256="9" * 64)),
        manifest(shard(1), shard(2, tokens=10)),
        manifest(shard(1), shard(2), dtype="uint32"),
        manifest(shard(1), shard(2), domain="CommonCrawl"),
    ]
    assert len({base, *map(digest_of, others)}) == 1 + len(others)
    assert digest_of(manifest(shard(1), shard(2)), "test") != base
    assert digest_of(manifest(shard(1), shard(2)), domains=["redpajamac4"]) != base


def test_digest_of_selected_domains():
    one = manifest(shard(1))
    assert [text.domain for text in domain_texts(one, "train", ["book", "c4"])] == ["C4", "Book"]
    assert domain_texts(one, "validation") == []
