"""How many tokens the tokenizer of a run's data has: its embeddings follow from it."""

from __future__ import annotations

from pathlib import Path

from data_prep.manifest import MANIFEST_NAME, load_manifest
from megatron_ext.data.cache import ShardCache
from megatron_ext.errors import UserError
from megatron_ext.files import is_url


def vocab_size(path: str, cache_dir: str | None) -> int:
    """Tokens of the tokenizer that prepared data were made with.

    Args:
        path: `data.path`.
        cache_dir: `data.cache_dir`.

    Raises:
        UserError: there are no such data here.
    """
    if is_url(path):
        return ShardCache(path, Path(cache_dir or "")).manifest.tokenizer.vocab_size
    if not (Path(path) / MANIFEST_NAME).is_file():
        problem = f"no prepared data in {path} on this machine, and a model's size follows from their tokenizer"
        raise UserError("data.path", problem, f"prepare them, or put a copy of their {MANIFEST_NAME} there")
    return load_manifest(Path(path)).tokenizer.vocab_size
