"""Stored curves: only those of the same tokens are compared."""

from __future__ import annotations

from pathlib import Path

from corpora import prepared
from gpu_curves import fingerprint


def test_the_same_tokens_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "there", "other")]
    for folder in folders:
        folder.mkdir()
    here, there = (prepared(folder, documents=30) for folder in folders[:2])
    assert fingerprint(here) == fingerprint(there) != fingerprint(prepared(folders[2], documents=33))
