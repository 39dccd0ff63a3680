"""Digests of files, compared with published values of xxHash and with the files on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint import contents
from megatron_ext.checkpoint.contents import CheckedFile, FileDigest, compute_digest

EMPTY = FileDigest(0, "99aa06d3014798d86001c324468d497f")
"""Published xxHash value of empty input with seed 0."""


def test_digest_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert compute_digest(tmp_path / "empty") == EMPTY
    with CheckedFile(tmp_path / "new") as file:
        assert file.digest == EMPTY


@pytest.mark.parametrize("block", [1, 1000, 8 << 20])
def test_digests_agree_for_all_block_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(contents, "_BLOCK", block)
    parts = [b"", b"header", memoryview(np.arange(700, dtype=np.int32)).cast("B"), bytes(range(256))]
    with CheckedFile(tmp_path / "file") as file:
        for part in parts:
            assert file.write(part) == len(part)
        assert file.tell() == 6 + 2800 + 256
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert compute_digest(tmp_path / "file") == file.digest


def test_torch_saves_into_it(tmp_path: Path) -> None:
    tensor = torch.arange(10_000.0)
    with CheckedFile(tmp_path / "file") as file:
        torch.save(tensor, file)
    assert file.digest == compute_digest(tmp_path / "file")
    assert torch.equal(torch.load(tmp_path / "file"), tensor)


def test_a_flipped_bit_changes_the_checksum(tmp_path: Path) -> None:
    for name, data in {"a": b"state", "b": b"statd"}.items():
        (tmp_path / name).write_bytes(data)
    a, b = (compute_digest(tmp_path / name) for name in "ab")
    assert a.size == b.size
    assert a.xxh3_128 != b.xxh3_128
