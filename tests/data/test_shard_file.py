"""The file and index of one shard, written by hand: garbage between documents, empty documents, damage while open."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from data_prep.manifest import ShardEntry
from megatron_ext.data import shard_file
from megatron_ext.data.shard_file import OpenShard
from megatron_ext.utils.errors import UserError

UINT16 = np.dtype("<u2")
COUNTS = [3, 0, 1, 250, 0, 0, 7, 64, 1, 1, 0] * 20
"""Token counts of documents. Some entries of the sparse index fall within runs of empty documents."""


def write_shard(root: Path, counts: list[int] = COUNTS, dtype: np.dtype = UINT16) -> tuple[ShardEntry, np.ndarray]:
    """Write a shard of documents with the given token counts, and return its entry and all its tokens."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, 2 ** (8 * dtype.itemsize), sum(counts)).astype(np.int64)
    content, rows, used = b"", [], 0
    for count in counts:
        content += generator.bytes(int(generator.integers(1, 60)))  # documents are not aligned
        rows.append((len(content), count))
        content += tokens[used : used + count].astype(dtype).tobytes()
        used += count
    (root / "a.tar").write_bytes(content)
    np.save(root / "a.npy", np.array(rows, dtype="<i8").reshape(-1, 2))
    size = (root / "a.npy").stat().st_size
    return ShardEntry("a.tar", "a.npy", len(counts), len(tokens), len(content), size, "", ""), tokens


@pytest.mark.parametrize(("stride", "dtype"), [(1, "<u2"), (2, "<u2"), (64, "<u2"), (64, "<u4"), (1000, "<u2")])
def test_any_range_is_read(tmp_path, monkeypatch, stride, dtype):
    monkeypatch.setattr(shard_file, "INDEX_STRIDE", stride)
    entry, tokens = write_shard(tmp_path, dtype=np.dtype(dtype))
    owners = np.repeat(np.arange(len(COUNTS)), COUNTS)
    first = OpenShard(tmp_path, entry, np.dtype(dtype))
    again = OpenShard(tmp_path, entry, np.dtype(dtype), first.sparse_index)
    generator = np.random.default_rng(1)
    for number in range(300):
        start = int(generator.integers(0, len(tokens)))
        length = 1 + int(generator.integers(0, min(len(tokens) - start, 3 if number % 2 else 2000)))
        out = (first, again)[number % 2].read(start, length)
        assert out.dtype == dtype
        assert np.array_equal(out, tokens[start : start + length])
        found = first.documents(start, length)
        assert found.first == owners[start]
        assert found.first + len(found.offsets) - 1 == owners[start + length - 1]
        assert np.array_equal(
            found.starts, np.concatenate([[0], np.cumsum(COUNTS)])[found.first :][: len(found.starts)]
        )


def test_truncated_while_open(tmp_path):
    entry, tokens = write_shard(tmp_path)
    shard = OpenShard(tmp_path, entry, UINT16)
    os.truncate(tmp_path / "a.tar", entry.bytes // 2)
    with pytest.raises(UserError) as caught:
        shard.read(0, len(tokens))
    assert str(caught.value).startswith(f"{tmp_path / 'a.tar'}: is truncated: found {entry.bytes // 2} bytes; ")


def test_disk_error_names_the_file(tmp_path, monkeypatch):
    entry, _ = write_shard(tmp_path)
    shard = OpenShard(tmp_path, entry, UINT16)

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(UserError, match=r"a\.npy: cannot be read \(Input/output error\); "):
        shard.read(0, 3)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    entry, tokens = write_shard(tmp_path)
    shard, whole = OpenShard(tmp_path, entry, UINT16), os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: whole(file, min(length, 100), offset))
    assert np.array_equal(shard.read(0, len(tokens)), tokens)


@pytest.mark.parametrize(
    "rows",
    [
        np.array([(0, 2), (0, 2)]),  # overlapping documents
        np.array([(0, 5), (10, -1)]),
        np.array([(0, 2), (4, 1)]),  # a token count that differs from the manifest's
        np.array([(0, 2), (4, 2)], dtype=np.int32),
        np.array([(0, 2, 0), (4, 2, 0)]),
        np.asfortranarray([(0, 2), (4, 2)]),
    ],
)
def test_invalid_index(tmp_path, rows):
    write_shard(tmp_path)
    np.save(tmp_path / "a.npy", rows)
    entry = ShardEntry("a.tar", "a.npy", 2, 4, 0, 0, "", "")
    with pytest.raises(UserError, match=r"a\.npy: does not match the manifest; "):
        OpenShard(tmp_path, entry, UINT16)


def test_descriptors_are_closed(tmp_path):
    entry, _ = write_shard(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        OpenShard(tmp_path, entry, UINT16)
    assert len(os.listdir("/proc/self/fd")) == before


def test_token_id_outside_the_vocabulary(tmp_path):
    entry, tokens = write_shard(tmp_path)
    largest = int(tokens.max())
    whole = OpenShard(tmp_path, entry, UINT16, vocab_size=largest + 1)
    assert np.array_equal(whole.read(0, len(tokens)), tokens)
    smaller = OpenShard(tmp_path, entry, UINT16, vocab_size=largest)
    with pytest.raises(
        UserError, match=rf"a\.tar: contains token id {largest}, but .* vocabulary has {largest} tokens; "
    ):
        smaller.read(0, len(tokens))
