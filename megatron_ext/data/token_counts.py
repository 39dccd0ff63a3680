"""Occurrences of each token in a bounded sample of the training text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.manifest import Manifest
from megatron_ext.data.shards import TokenStore
from megatron_ext.utils.errors import UserError

WINDOWS, WINDOW = 256, 16_384
"""Number of the sample's windows, spread evenly over the text, and tokens of each: 4.2 million tokens in all."""


def sample_token_counts(
    root: Path, manifest: Manifest, domains: Sequence[str], rank: int = 0, world_size: int = 1
) -> npt.NDArray[np.int64] | None:
    """Count the tokens of this rank's share of the sample.

    The sample depends on the data alone: domains count in proportion to their tokens, whatever a run's weights are. A
    text shorter than the sample is counted in full.

    Args:
        root: folder of the manifest.
        manifest: manifest of the folder.
        domains: training domains.
        rank: rank among the counting processes.
        world_size: number of counting processes.

    Returns:
        Counts, int64 [vocabulary]; None: the share cannot be read.
    """
    counts = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    try:
        store = TokenStore(root, manifest, "train", domains, max_open=1)
        for start, length in _windows(store.num_tokens)[rank::world_size]:
            counts += np.bincount(store.read(start, length), minlength=len(counts))
    except UserError:
        return None
    return counts


def _windows(num_tokens: int) -> list[tuple[int, int]]:
    """Return first token and length of each window."""
    if num_tokens <= WINDOWS * WINDOW:
        return [(start, min(WINDOW, num_tokens - start)) for start in range(0, num_tokens, WINDOW)]
    return [(index * (num_tokens - WINDOW) // (WINDOWS - 1), WINDOW) for index in range(WINDOWS)]
