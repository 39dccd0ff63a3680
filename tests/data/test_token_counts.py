"""Counts of tokens in a sample of the training text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.manifest import Manifest
from megatron_ext.data import token_counts
from megatron_ext.data.token_counts import sample_token_counts


def test_a_short_text_is_counted_in_full_by_all_ranks_together(
    prepared: Path, manifest: Manifest, documents: dict[str, list[np.ndarray]]
) -> None:
    parts = [sample_token_counts(prepared, manifest, ["CommonCrawl", "C4"], rank, 3) for rank in range(3)]
    expected = np.bincount(np.concatenate(documents["train"]), minlength=manifest.tokenizer.vocab_size)
    assert np.array_equal(np.sum(parts, axis=0), expected)  # type: ignore[arg-type]


def test_windows_of_a_long_text_reach_from_its_beginning_to_its_end(
    prepared: Path, manifest: Manifest, documents: dict[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counts, "WINDOWS", 3)
    monkeypatch.setattr(token_counts, "WINDOW", 20)
    tokens = np.concatenate(documents["train"])
    middle = (len(tokens) - 20) // 2
    chosen = np.concatenate([tokens[:20], tokens[middle : middle + 20], tokens[-20:]])
    counts = sample_token_counts(prepared, manifest, ["CommonCrawl", "C4"])
    assert np.array_equal(counts, np.bincount(chosen, minlength=manifest.tokenizer.vocab_size))  # type: ignore[arg-type]


def test_training_text_that_is_not_there_has_no_counts(tmp_path: Path, manifest: Manifest) -> None:
    without = replace(manifest, domains=[entry for entry in manifest.domains if entry.split != "train"])
    for present in (manifest, without):
        assert sample_token_counts(tmp_path, present, ["CommonCrawl", "C4"]) is None
