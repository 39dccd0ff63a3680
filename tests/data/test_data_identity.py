"""Record of a run's data: changes that affect the run, and messages about the differences."""

from dataclasses import replace

import pytest

from megatron_ext.data.identity import data_record, describe_differences

TRAIN, TEST = ["C4", "CommonCrawl"], ["ArXiv"]


def record(manifest, **given):
    options = {"seq_length": 16, "seed": 3, "train": TRAIN, "test": TEST, "weights": None} | given
    train, test = options.pop("train"), options.pop("test")
    return data_record(manifest, train, test, **options)


def test_digest_of_the_order_differs_from_the_text(manifest):
    base = record(manifest)
    for given in ({"seq_length": 32}, {"seed": 4}, {"weights": {"C4": 1, "CommonCrawl": 2}}):
        other = record(manifest, **given)
        assert other["train"] == base["train"]
        assert other["order"] != base["order"]
    assert record(manifest, weights={"C4": 1.0, "CommonCrawl": 2.0}) == record(
        manifest, weights={"CommonCrawl": 0.2, "C4": 0.1}
    )
    fewer = record(manifest, train=["C4"])
    assert fewer["train"] != base["train"]
    assert record(manifest, test=[])["evaluation"] != base["evaluation"]
    assert record(manifest, test=[])["order"] == base["order"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 1}, "has 2 documents, 1 tokens (previously 2 documents, "),
        ({"sha256": "0" * 64}, "has the same number of documents and tokens, but different shards"),
    ],
)
def test_differences_are_named_by_domain(manifest, change, message):
    def changed(entry):
        if (entry.split, entry.domain) != ("train", "C4"):
            return entry
        first = replace(entry.shards[0], **change)
        tokens = entry.tokens if "tokens" not in change else 1
        return replace(entry, documents=2, tokens=tokens, shards=[first, *entry.shards[1:]])

    def with_two_documents(entry):
        return replace(entry, documents=2) if entry.domain == "C4" else entry

    before = record(replace(manifest, domains=[with_two_documents(entry) for entry in manifest.domains]))
    after = record(replace(manifest, domains=[changed(with_two_documents(entry)) for entry in manifest.domains]))
    (phrase,) = describe_differences(before, after, "train")
    assert phrase.startswith(f"C4 (train) {message}")
    assert describe_differences(before, before, "train", "validation", "test") == []
    assert describe_differences(before, record(manifest, train=["CommonCrawl"]), "train") == ["C4 (train) is missing"]
    assert describe_differences(before, after, "test") == []
