"""Vocabulary size of a run's data, which determines the size of the embeddings."""

from __future__ import annotations

from pathlib import Path

from data_prep.manifest import MANIFEST_NAME, load_manifest
from megatron_ext.data.cache import ShardCache
from megatron_ext.utils.atomic_files import is_url
from megatron_ext.utils.errors import UserError


def vocab_size(path: str, cache_dir: str | None) -> int:
    """Return the vocabulary size of the tokenizer of prepared data.

    Args:
        path: `data.path`.
        cache_dir: `data.cache_dir`.

    Raises:
        UserError: the data is not available on this machine.
    """
    if is_url(path):
        return ShardCache(path, Path(cache_dir or "")).manifest.tokenizer.vocab_size
    if not (Path(path) / MANIFEST_NAME).is_file():
        problem = f"there is no prepared data in {path} on this machine, but the model's size depends on its tokenizer"
        raise UserError("data.path", problem, f"prepare the data, or copy its {MANIFEST_NAME} there")
    return load_manifest(Path(path)).tokenizer.vocab_size
