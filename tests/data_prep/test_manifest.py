import hashlib
import json

import numpy as np
import pytest

from data_prep.manifest import (
    DomainEntry,
    Manifest,
    ShardEntry,
    SkippedEntry,
    TokenizerEntry,
    load_manifest,
    save_manifest,
    verify_shard,
)
from data_prep.storage import sha256_of
from megatron_ext.utils.errors import UserError


def manifest() -> Manifest:
    def shard(folder: str) -> ShardEntry:
        return ShardEntry(f"{folder}/0.tar", f"{folder}/0.index.npy", 2, 9, 10240, 160, "a" * 64, "b" * 64)

    entries = [
        DomainEntry(split, name, 2, 9, 30, 31, [shard(f"{split}/{name}")])
        for split in ("train", "test")
        for name in ("C4", "Book")
    ]
    return Manifest(
        version=1,
        tokenizer=TokenizerEntry("tokenizer.json", "c" * 64, 300, "</s>", 2),
        dtype="uint16",
        domains=entries,
        skipped=[SkippedEntry("x.jsonl", "no text", 3)],
        options={"on_error": "skip"},
        provenance={"files": 1},
    )


def test_round_trip(tmp_path):
    save_manifest(tmp_path, manifest())
    assert load_manifest(tmp_path) == manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_select_in_the_manifest_order_by_any_name():
    assert [entry.domain for entry in manifest().select("train", ["redpajamabook", "c4"])] == ["C4", "Book"]
    assert len(manifest().select()) == 4
    assert manifest().domain_names("test") == ["C4", "Book"]
    with pytest.raises(UserError, match=r"^manifest.json: no domain Law in the train split; choose from: C4, Book$"):
        manifest().select("train", ["Law"])
    with pytest.raises(UserError, match=r"^manifest.json: the validation split is empty; .*: train, test$"):
        manifest().select("validation")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b'{"version": 1, "tok', "is damaged (Unterminated string"),
        ({"version": 9}, "has version 9, but this program reads version 1"),
        ({"dtype": "float32"}, "is damaged (dtype: "),
        ({"domains": [{"split": "train"}]}, "is damaged (domains.0"),
        ({"surprise": 1}, "is damaged (surprise: "),
    ],
)
def test_unreadable_manifest_is_one_line_that_names_it(tmp_path, change, problem):
    save_manifest(tmp_path, manifest())
    path = tmp_path / "manifest.json"
    if change is None:
        path.unlink()
    else:
        whole = json.loads(path.read_bytes())
        path.write_bytes(change if isinstance(change, bytes) else json.dumps({**whole, **change}).encode())
    with pytest.raises(UserError) as caught:
        load_manifest(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {problem}")
    assert message.endswith("; prepare the data again with `selectron prepare`")
    assert "\n" not in message


@pytest.mark.parametrize("which", ["x.tar", "x.index.npy"])
def test_verify_shard_names_the_file(tmp_path, which):
    for name in ("x.tar", "x.index.npy"):
        (tmp_path / name).write_bytes(name.encode() * 10)
    hashes = [sha256_of(tmp_path / name) for name in ("x.tar", "x.index.npy")]
    entry = ShardEntry("x.tar", "x.index.npy", 1, 1, 50, 110, *hashes)
    verify_shard(tmp_path, entry, "sha256")

    path = tmp_path / which
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    verify_shard(tmp_path, entry, "size")  # a flipped bit does not change the size
    with pytest.raises(UserError, match=rf"{which}: sha256 differs: expected [0-9a-f]{{64}}, found [0-9a-f]{{64}}; "):
        verify_shard(tmp_path, entry, "sha256")
    path.write_bytes(content[:-1])
    size = len(content)
    with pytest.raises(UserError, match=rf"{which}: is truncated: expected {size} bytes, found {size - 1}; "):
        verify_shard(tmp_path, entry, "size")
    path.write_bytes(content + b"!")
    with pytest.raises(UserError, match=rf"{which}: is too long: expected {size} bytes, found {size + 1}; "):
        verify_shard(tmp_path, entry, "size")
    path.unlink()
    with pytest.raises(UserError, match=rf"{which}: is missing; "):
        verify_shard(tmp_path, entry, "size")


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 1001])
def test_sha256_of_files_shorter_and_longer_than_a_block(tmp_path, monkeypatch, size):
    monkeypatch.setattr("data_prep.storage.HASH_BLOCK_BYTES", 100)
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(content)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(content).hexdigest()
