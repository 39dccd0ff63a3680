"""Stored curves: only those of the same tokens are compared. Layouts: all may be trained."""

from __future__ import annotations

from pathlib import Path

from corpora import prepared
from gpu_curves import LAYOUTS, configuration, fingerprint

from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.mixers.core.registry import load_all


def test_the_same_tokens_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "there", "other")]
    for folder in folders:
        folder.mkdir()
    here, there = (prepared(folder, documents=30) for folder in folders[:2])
    assert fingerprint(here) == fingerprint(there) != fingerprint(prepared(folders[2], documents=33))


def test_every_layout_may_be_trained(tmp_path: Path) -> None:
    config, mixers = configuration(tmp_path, tmp_path), load_all()
    layouts = {name: check(load_config(config, told, mixers), gpus, mixers) for name, (gpus, told) in LAYOUTS.items()}
    assert layouts["tp2_no_sp"].data_parallel_size == layouts["pp2_interleaved"].data_parallel_size == 1
