"""Signatures of a task with more documents than are sorted at a time. They equal datatrove's byte for byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

from data_prep.deduplication import signatures
from data_prep.deduplication.signatures import BoundedSignature, ExactSignature, NearSignature


def _documents(number: int) -> list[Document]:
    """Return documents with few distinct texts, so that signatures repeat. Some are too short for a signature."""
    dice = random.Random(3)
    texts = [" ".join(dice.choices(["one", "two", "three", "four", "five"], k=dice.randint(1, 9))) for _ in range(11)]
    return [Document(text=dice.choice(texts), id=str(i)) for i in range(number)]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [0, 1, 6, 7, 8, 14, 50])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (NearSignature, MinhashConfig(n_grams=3, num_buckets=4, hashes_per_bucket=2)),
        (ExactSignature, MinhashConfig(num_buckets=1, hashes_per_bucket=2)),
    ],
)
def test_merged_blocks_equal_one_sort(
    kind: type[BoundedSignature], config: MinhashConfig, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = _documents(number)
    MinhashDedupSignature.run(kind(str(tmp_path / "whole"), config), documents, rank=3)
    monkeypatch.setattr(signatures, "BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(signatures, "RECORDS_PER_READ", 3)
    step = kind(str(tmp_path / "blocks"), config)
    step.run(iter(documents), rank=3)
    assert _files(tmp_path / "blocks") == _files(tmp_path / "whole")
    assert step.stats["total"].total == number


def test_task_killed_during_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "BLOCK_DOCUMENTS", 7)
    config = MinhashConfig(n_grams=3, num_buckets=4, hashes_per_bucket=2)
    NearSignature(str(tmp_path / "never"), config).run(_documents(30))

    class KilledError(BaseException):
        pass

    class Killed(NearSignature):
        def _merge(self, blocks: object, name: str) -> None:
            if name.startswith("bucket_002"):
                raise KilledError
            super()._merge(blocks, name)  # type: ignore[arg-type]

    with pytest.raises(KilledError):
        Killed(str(tmp_path / "once"), config).run(_documents(30))
    NearSignature(str(tmp_path / "once"), config).run(_documents(30))
    assert _files(tmp_path / "once") == _files(tmp_path / "never")
