"""Loss by domain and document: values are correct and independent of layout and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluated
import numpy as np
import plain_classes
import pytest
from corpora import prepared
from tokenizers import Tokenizer

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
        scored = expected[f"{record['domain']}/{record['split']}"]
        documents = {document: [loss for loss, _ in tokens] for document, tokens in scored.items()}
        assert record["documents"] == sorted(documents)
        assert record["document_tokens"] == [len(documents[d]) for d in sorted(documents)]
        assert record["document_loss"] == pytest.approx([sum(documents[d]) for d in sorted(documents)], abs=1e-4)
        every = [loss for losses in documents.values() for loss in losses]
        assert record["loss"] == pytest.approx(np.mean(every), abs=1e-9)
        assert np.std(every) > 0.1  # otherwise any order of the tokens would pass
        assert_classes(record, scored, root)


def assert_classes(record: dict[str, Any], scored: dict[int, list[tuple[float, int]]], root: Path) -> None:
    """Compare the sums by class and document with those of a plain loop over tokens."""
    manifest = load_manifest(root)
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(manifest.tokenizer.vocab_size)]
    train = TokenStore(root, manifest, "train")
    counts = np.bincount(train.read(0, train.num_tokens), minlength=len(texts)).tolist()
    store = TokenStore(root, manifest, record["split"], [record["domain"]])
    losses = {offset: (loss, document) for document, tokens in scored.items() for loss, offset in tokens}
    expected: dict[str, dict[int, tuple[float, int]]] = {}
    for start in range(0, store.num_tokens - 1, evaluated.LENGTH):
        length = min(evaluated.LENGTH + 1, store.num_tokens - start)
        tokens, starts = store.read(start, length).tolist(), store.document_starts(start, length).tolist()
        found = plain_classes.classes(tokens, starts, texts, (), manifest.tokenizer.eos_id, counts)
        for offset, names in enumerate(found, start=start + 1):
            loss, document = losses[offset]
            for name in names:
                nats, count = expected.setdefault(name, {}).get(document, (0.0, 0))
                expected[name][document] = (nats + loss, count + 1)
    assert set(record["classes"]) == set(expected)
    for name, sums in expected.items():
        by_document = [sums.get(document, (0.0, 0)) for document in record["documents"]]
        assert record["classes"][name]["document_tokens"] == [count for _, count in by_document]
        assert record["classes"][name]["document_loss"] == pytest.approx([nats for nats, _ in by_document], abs=1e-4)


def same(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(records, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        tokens = np.array(theirs["document_tokens"])
        assert np.abs(np.subtract(ours["document_loss"], theirs["document_loss"]) / tokens).max() < 1e-4
        for field in ("domain", "split", "num_tokens", "documents", "document_tokens", "step", "tokens"):
            assert ours[field] == theirs[field]
        assert list(ours["classes"]) == list(theirs["classes"])
        for name, found in ours["classes"].items():
            alone = theirs["classes"][name]
            assert found["document_tokens"] == alone["document_tokens"]
            assert found["document_loss"] == pytest.approx(alone["document_loss"], rel=1e-4, abs=2e-4)


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
