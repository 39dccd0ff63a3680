"""Shortcuts to the training samples of a prepared folder, without the checks before a run."""

from __future__ import annotations

from pathlib import Path

from data_prep.manifest import Manifest, load_manifest
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import TokenStore


def open_samples(root: Path, seq_length: int, seed: int) -> tuple[TrainingSamples, Manifest]:
    """Return training samples of all domains in proportion to their tokens, and the manifest.

    Args:
        root: a prepared folder.
        seq_length: T, input tokens per sample.
        seed: seed of the sample order.

    Raises:
        UserError: the folder has no manifest or no training text, or too little training text for one sample.
    """
    manifest = load_manifest(root)
    return TrainingSamples(TokenStore(root, manifest, "train"), seq_length, seed), manifest


def shard_files(root: Path) -> list[Path]:
    """List tars and indexes of the training text in a prepared folder.

    Raises:
        UserError: the folder has no manifest or no training text.
    """
    shards = [shard for entry in load_manifest(root).select("train") for shard in entry.shards]
    return [root / name for shard in shards for name in (shard.file, shard.index)]
