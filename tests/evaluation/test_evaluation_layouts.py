"""Loss by domain and document: values are correct and independent of layout and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluated
import numpy as np
import pytest
from corpora import prepared

from data_prep.manifest import load_manifest
from megatron_ext.data.shards import TokenStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("evaluated"), documents=90, words=(5, 40))


@pytest.fixture(scope="module")
def alone(pool: Any, root: Path) -> list[dict[str, Any]]:
    """Evaluate in one process, one sample at a time."""
    return pool.run(evaluated.evaluate, 1, root, {}, 1)[0]


def test_every_label_of_every_document_counts_once(alone: list[dict[str, Any]], root: Path) -> None:
    manifest = load_manifest(root)
    assert [(r["domain"], r["split"]) for r in alone] == [
        ("First", "validation"),
        ("Second", "validation"),
        ("Other", "test"),
    ]
    for record in alone:
        store = TokenStore(root, manifest, record["split"], [record["domain"]])
        assert record["num_tokens"] == store.num_tokens - 1  # all but the first token are labels
        counts = np.bincount(store.document_ids(1, store.num_tokens - 1))
        assert record["documents"] == np.flatnonzero(counts).tolist()
        assert record["document_tokens"] == counts[counts > 0].tolist()
        assert (record["step"], record["tokens"]) == (7, 99)


def test_sums_by_document_are_those_of_a_token_at_a_time(alone: list[dict[str, Any]], pool: Any, root: Path) -> None:
    expected = pool.run(evaluated.by_hand, 1, root)[0]
    for record in alone:
        documents = expected[f"{record['domain']}/{record['split']}"]
        assert record["documents"] == sorted(documents)
        assert record["document_tokens"] == [len(documents[d]) for d in sorted(documents)]
        assert record["document_loss"] == pytest.approx([sum(documents[d]) for d in sorted(documents)], abs=1e-4)
        every = [loss for losses in documents.values() for loss in losses]
        assert record["loss"] == pytest.approx(np.mean(every), abs=1e-9)
        assert np.std(every) > 0.1  # otherwise any order of the tokens would pass


def same(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(records, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        tokens = np.array(theirs["document_tokens"])
        assert np.abs(np.subtract(ours["document_loss"], theirs["document_loss"]) / tokens).max() < 1e-4
        for field in ("domain", "split", "num_tokens", "documents", "document_tokens", "step", "tokens"):
            assert ours[field] == theirs[field]


@pytest.mark.parametrize("size", [2, 5, 64])
def test_padding_counts_for_nothing(size: int, alone: list[dict[str, Any]], pool: Any, root: Path) -> None:
    """Micro-batch sizes that leave the last micro-batch partly empty. With 64 it is nearly all padding."""
    same(pool.run(evaluated.evaluate, 1, root, {}, size)[0], alone)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tensor": 2, "sequence": True},
        {"context": 2},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
    ],
    ids=["dp2", "tp2_sp", "cp2", "pp2", "pp2_interleaved"],
)
def test_every_layout_gives_the_same(
    parallel: dict[str, Any], alone: list[dict[str, Any]], pool: Any, root: Path
) -> None:
    """The loss of a training batch is that of the optimizer step, too."""
    first, second = pool.run(evaluated.evaluate_and_train, 2, root, parallel)
    assert first == second  # all ranks have the records
    records, evaluated_loss, training_loss = first
    same(records, alone)
    assert evaluated_loss == pytest.approx(training_loss, abs=1e-6)


def test_fewer_sequences_are_the_same_ones_on_every_layout(pool: Any, root: Path) -> None:
    alone = pool.run(evaluated.evaluate, 1, root, {}, 1, 5)[0]
    assert all(record["num_tokens"] <= 5 * evaluated.LENGTH for record in alone)
    same(pool.run(evaluated.evaluate, 2, root, {}, 2, 5)[0], alone)
