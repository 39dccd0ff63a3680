import resource
import shutil

import numpy as np
import pytest

from megatron_ext.data import shards
from megatron_ext.data.shards import TokenStore
from megatron_ext.utils.errors import UserError


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_stream_is_the_concatenated_documents(prepared, manifest, documents, split):
    store = TokenStore(prepared, manifest, split)
    stream = np.concatenate(documents[split])
    ids = np.repeat(np.arange(len(documents[split])), [len(item) for item in documents[split]])
    assert (store.num_tokens, store.num_documents) == (len(stream), len(documents[split]))
    assert np.array_equal(store.read(0, len(stream)), stream)
    assert np.array_equal(store.document_ids(0, len(stream)), ids)
    generator = np.random.default_rng(0)
    for _ in range(200):
        start = int(generator.integers(0, len(stream)))
        length = int(generator.integers(0, min(400, len(stream) - start) + 1))
        read, documents_read = store.read(start, length), store.document_ids(start, length)
        assert (read.dtype, documents_read.dtype) == (np.uint16, np.int64)  # tokens keep the dtype of the files
        assert np.array_equal(read, stream[start : start + length])
        assert np.array_equal(documents_read, ids[start : start + length])
        before = np.concatenate([[-1], ids])[start : start + length]
        assert np.array_equal(store.document_starts(start, length), np.flatnonzero(documents_read != before))


def test_domains_in_any_order(prepared, manifest, store):
    first, second = (TokenStore(prepared, manifest, "train", [name]) for name in ("c4", "RedPajamaCommonCrawl"))
    both = TokenStore(prepared, manifest, "train", ["CommonCrawl", "C4"])
    whole = np.concatenate([part.read(0, part.num_tokens) for part in (first, second)])
    assert np.array_equal(both.read(0, both.num_tokens), whole)
    assert np.array_equal(store.read(0, store.num_tokens), whole)
    assert both.domains == ["C4", "CommonCrawl"]


@pytest.mark.parametrize(("fit", "max_open"), [(1, None), (9, 1)])
def test_reads_do_not_depend_on_the_open_limit(prepared, manifest, documents, monkeypatch, fit, max_open):
    monkeypatch.setattr(shards, "max_open_shards", lambda: fit)
    store = TokenStore(prepared, manifest, "train", max_open=max_open)
    stream = np.concatenate(documents["train"])
    for start in np.random.default_rng(1).integers(0, len(stream) - 50, 60).tolist():
        assert np.array_equal(store.read(start, 50), stream[start : start + 50])
        assert len(store._open) <= 1


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "shards_open"),
    [
        (1024, 524288, 16384, 2048),
        (1024, 1024, 1024, 128),
        (1024, resource.RLIM_INFINITY, 16384, 2048),
        (20000, 20000, 20000, 2048),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048),
        (4, 4, 4, 1),
    ],
)
def test_max_open_shards_follows_the_file_limit(monkeypatch, soft, hard, raised, shards_open):
    limit = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limit.__setitem__(slice(2), limits))
    assert shards.max_open_shards() == shards_open
    assert limit == [raised, hard]


def test_file_limit_that_cannot_be_raised(monkeypatch):
    def refuse(*_):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 10240))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert shards.max_open_shards() == 32


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, -1), (0, 10**9)])
def test_range_outside(store, start, length):
    with pytest.raises(IndexError, match=r"tokens \["):
        store.read(start, length)


def test_unknown_domain(prepared, manifest):
    with pytest.raises(UserError, match=r"no domain Law in the train split; choose from: C4, CommonCrawl$"):
        TokenStore(prepared, manifest, "train", ["Law"])


@pytest.mark.parametrize("damage", ["missing", "truncated", "other index", "broken index"])
def test_unverified_damage_names_the_file(prepared, manifest, tmp_path, damage):
    root = tmp_path / "copy"
    shutil.copytree(prepared, root)
    shard = manifest.select("train")[0].shards[1]
    other = manifest.select("train")[0].shards[0]
    tar, index = root / shard.file, root / shard.index
    if damage == "missing":
        tar.unlink()
    elif damage == "truncated":
        tar.write_bytes(tar.read_bytes()[:2000])
    elif damage == "other index":
        index.write_bytes((root / other.index).read_bytes())
    else:
        index.write_bytes(b"")
    store = TokenStore(root, manifest, "train")
    with pytest.raises(UserError) as caught:
        store.read(0, store.num_tokens)
    assert str(tar if damage in ("missing", "truncated") else index).removesuffix(".index.npy") in str(caught.value)
    assert "\n" not in str(caught.value)
