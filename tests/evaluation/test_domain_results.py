"""Confidence intervals of losses by domain, and losses per byte."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from corpora import prepared

from data_prep.manifest import load_manifest
from megatron_ext.evaluation import suite
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses, write_domains
from megatron_ext.evaluation.registry import read_overrides
from megatron_ext.utils.ratio_interval import ratio_interval


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
    assert "\nNo interval for fewer than 3 documents: Other (test), Other (test).\n" in said
    assert "\nNo values per byte for Other (test): only a part was evaluated" in said


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (["resamples=500"], "domains.resamples has"),
        (["seed=1", "resamples=500"], "domains.resamples and domains.seed have"),
        (["sequences=3"], None),
    ],
)
def test_what_has_no_effect_any_more_is_said(
    fields: list[str], named: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "_open_domains", lambda *_: None)
    evaluated: Any = SimpleNamespace(config=SimpleNamespace(data=None))
    suite.check_domains(evaluated, read_overrides("domains", fields))
    it = "them" if named is not None and " and " in named else "it"
    said = f"selectron: warning: {named} no effect any more; remove {it}\n"
    assert capsys.readouterr().err == ("" if named is None else said)


def test_intervals_of_few_documents_are_said_to_be_rough(tmp_path: Path) -> None:
    manifest = load_manifest(prepared(tmp_path, documents=60))
    nats, tokens = [10.0, 22.0, 31.0], [4, 8, 10]
    record = {"domain": "Other", "split": "test", "loss": 63 / 22, "num_tokens": 22}
    (found,) = domain_losses(
        [record | {"document_loss": nats, "document_tokens": tokens}], manifest, DomainOptions(confidence=0.9)
    )
    assert found.interval == ratio_interval(np.array(nats), np.array(tokens), 0.9)
    said = write_domains([found], DomainOptions(confidence=0.9), {}, tmp_path)
    assert "Fewer than 20 documents, so intervals are rough: Other (test).\n" in said
