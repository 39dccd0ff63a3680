"""Malicious manifests: rejected with the bad name before any file that they name is touched."""

import copy
import json
import time
from dataclasses import asdict
from typing import Any

import pytest

from data_prep.manifest import DomainEntry, Manifest, ShardEntry, TokenizerEntry, parse_manifest
from megatron_ext.utils.errors import UserError


def good() -> dict[str, Any]:
    shard = ShardEntry("train/C4/0.tar", "train/C4/0.index.npy", 2, 9, 10240, 160, "a" * 64, "b" * 64)
    test = ShardEntry("test/C4/0.tar", "test/C4/0.index.npy", 1, 4, 10240, 144, "c" * 64, "d" * 64)
    domains = [
        DomainEntry("train", "C4", 2, 9, 30, 31, [shard]),
        DomainEntry("test", "C4", 1, 4, 10, 10, [test]),
    ]
    return asdict(Manifest(1, TokenizerEntry("tokenizer.json", "e" * 64, 300, "</s>", 2), "uint16", domains))


def changed(location: str, value: object) -> bytes:
    tree = node = copy.deepcopy(good())
    *parents, last = location.split(".")
    for part in parents:
        node = node[int(part) if part.isdecimal() else part]
    node[last] = value
    return json.dumps(tree).encode()


SHARD = "domains.0.shards.0"
NAMES = ("tokenizer.file", f"{SHARD}.file", f"{SHARD}.index", "domains.1.shards.0.index")


def error_message(text: bytes) -> str:
    with pytest.raises(UserError) as caught:
        parse_manifest(text, "m.json")
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_valid_manifest():
    parsed = parse_manifest(json.dumps(good()).encode(), "m.json")
    assert asdict(parsed) == good()


@pytest.mark.parametrize("location", NAMES)
@pytest.mark.parametrize(
    "name",
    ["../../home/.ssh/authorized_keys", "/etc/cron.d/x", "a/../../b", "", "a\nb", "\x1b]0;x\x07", "C:\\x", "x" * 300],
)
def test_paths_that_leave_the_folder(location, name):
    assert error_message(changed(location, name)).startswith(f"m.json ({location}): names ")


@pytest.mark.parametrize("location", NAMES)
@pytest.mark.parametrize("name", ["manifest.json", "./manifest.json", ".locks/x", ".lock"])
def test_reserved_names(location, name):
    assert f"({location}): names {name.removeprefix('./')}, which is a reserved name" in error_message(
        changed(location, name)
    )


@pytest.mark.parametrize(
    ("location", "value", "problem"),
    [
        ("domains.0.tokens", -5, "domains.0.tokens: Input should be greater than or equal to 0"),
        (f"{SHARD}.tokens", -5, f"{SHARD}.tokens: Input should be greater"),
        (f"{SHARD}.tokens", 2**60, f"{SHARD}.tokens: Input should be less"),
        (f"{SHARD}.tokens", 9.0, f"{SHARD}.tokens: Input should be a valid integer"),
        (f"{SHARD}.tokens", "9", f"{SHARD}.tokens: Input should be a valid integer"),
        (f"{SHARD}.documents", True, f"{SHARD}.documents: Input should be a valid integer"),
        (f"{SHARD}.bytes", -1, f"{SHARD}.bytes: Input should be greater"),
        ("domains.0.tokens", 10, "domains.0.tokens: 10, but its shards have 9"),
        ("domains.1.documents", 0, "domains.1.documents: 0, but its shards have 1"),
        (f"{SHARD}.bytes", 17, f"{SHARD}.bytes: 17 is too small for 9 tokens of uint16"),
        (f"{SHARD}.index_bytes", 31, f"{SHARD}.index_bytes: 31 is too small for 2 documents"),
        (f"{SHARD}.sha256", "A" * 64, f"{SHARD}.sha256: "),
        (f"{SHARD}.index_sha256", "a" * 63, f"{SHARD}.index_sha256: "),
        (f"{SHARD}.sha256", "a" * 64 + "\n", f"{SHARD}.sha256: "),
        (f"{SHARD}.index", "train/C4/0.tar", f"{SHARD}.index: train/C4/0.tar is also {SHARD}.file"),
        (
            "domains.1.shards.0.file",
            "./tokenizer.json",
            "domains.1.shards.0.file: tokenizer.json is also tokenizer.file",
        ),
        ("domains.1.split", "train", "domains.1.domain: C4 occurs twice in train"),
        ("domains.1.split", "elsewhere", "domains.1.split: "),
        ("tokenizer.sha256", "", "tokenizer.sha256: '' is not a SHA-256 digest"),
        ("tokenizer.vocab_size", 0, "tokenizer.vocab_size: 0 does not fit uint16"),
        ("tokenizer.vocab_size", 65537, "tokenizer.vocab_size: 65537 does not fit uint16"),
        ("tokenizer.eos_id", 300, "tokenizer.eos_id: 300 is not below vocab_size 300"),
        ("tokenizer.eos_id", -1, "tokenizer.eos_id: -1 is not below vocab_size 300"),
        ("duplicates", -1, "duplicates: Input should be greater"),
        ("skipped", [{"file": "x", "reason": "y", "records": -1}], "skipped.0.records: Input should be greater"),
    ],
)
def test_counts_and_types(location, value, problem):
    assert error_message(changed(location, value)).startswith(f"m.json: is damaged ({problem}")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"version": 1, "options": ' + b'{"a":' * 100_000,
        b'{"version": ' + b"9" * 10_000 + b"}",
        b"\xff\xfe",
        b"",
        b"[]",
        b"null",
        b'{"version": [' + b"1," * 100_000 + b"1]}",
    ],
    ids=["arrays", "objects", "digits", "no_utf8", "empty", "array", "null", "long_version"],
)
def test_large_manifests_give_short_messages(text):
    start = time.thread_time()
    assert len(error_message(text)) < 400
    assert time.thread_time() - start < 1
