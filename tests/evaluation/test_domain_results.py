"""Intervals of losses by domain, and losses a byte."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from corpora import prepared

from data_prep.manifest import load_manifest
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses, ratio_interval, write_domains


def _drawn(documents: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    tokens = generator.integers(5, 400, documents).astype(float)
    return tokens * generator.normal(3.0, 0.5, documents), tokens


@pytest.mark.parametrize("confidence", [0.95, 0.5])
def test_the_interval_is_that_of_documents_drawn_again(confidence: float) -> None:
    nats, tokens = _drawn(60)
    generator = np.random.default_rng(9)
    drawn = []
    for _ in range(20_000):
        chosen = generator.integers(0, 60, 60)
        drawn.append(nats[chosen].sum() / tokens[chosen].sum())
    expected = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    found = ratio_interval(nats, tokens, DomainOptions(resamples=20_000, confidence=confidence))
    assert found == pytest.approx(expected, abs=0.04 * (expected[1] - expected[0]))


def test_a_seed_gives_the_same_interval() -> None:
    nats, tokens = _drawn(40)
    first, again, other = (ratio_interval(nats, tokens, DomainOptions(resamples=99, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_bytes_count_where_all_of_a_domain_was_read(tmp_path: Path) -> None:
    manifest = load_manifest(prepared(tmp_path, documents=60))
    (entry,) = manifest.select("test", ["Other"])
    texts = [json.loads(line) for line in (tmp_path / "raw.jsonl").open()]
    size = sum(len(text["text"].encode()) for text in texts if text["meta"]["redpajama_set_name"] == "Other")
    whole = {
        "domain": "Other",
        "split": "test",
        "loss": 2.5,
        "num_tokens": entry.tokens - 1,
        "document_loss": [1.0, 2.0],
        "document_tokens": [1, 2],
    }
    one = whole | {"num_tokens": 7, "document_loss": [17.5], "document_tokens": [7]}
    all_of_it, part = domain_losses([whole, one], manifest, DomainOptions(resamples=20))
    assert all_of_it.loss_per_byte == pytest.approx(2.5 * (entry.tokens - 1) / size)
    assert all_of_it.bits_per_byte == pytest.approx(2.5 * (entry.tokens - 1) / size / math.log(2))
    assert (part.loss_per_byte, part.bits_per_byte, part.interval) == (None, None, None)
    said = write_domains([all_of_it, part], DomainOptions(confidence=0.8), {"step": 3}, tmp_path)
    assert (tmp_path / "domains.md").read_text() == said
    written = json.loads((tmp_path / "domains.json").read_text())
    assert (written["step"], written["options"]["confidence"]) == (3, 0.8)
    assert "| 80 % interval |" in said
    assert [domain["loss"] for domain in written["domains"]] == [2.5, 2.5]
    assert "| Other | test | 1 | 7 | 2.5000 |  |  |  |" in said
