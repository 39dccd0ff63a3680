"""Lengths of the document pieces in packed samples, for models that process each document separately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

NUM_SAMPLES = 64
"""Number of samples counted by default, from the start of the order: 131,072 tokens if a sample has 2,048."""


class PackedSamples(Protocol):
    """Protocol of samples with known document boundaries, such as `TrainingSamples`."""

    seq_length: int

    def document_starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the offsets, among the T + 1 tokens of a sample, of the first tokens of documents."""
        ...


def document_lengths(samples: PackedSamples, indices: Sequence[int] = range(NUM_SAMPLES)) -> Counter[int]:
    """Count the document pieces of each length among the inputs of some samples.

    Args:
        samples: samples of a run.
        indices: indices of the samples to count.

    Returns:
        Number of pieces by length in tokens.
    """
    counts: Counter[int] = Counter()
    for index in indices:
        starts = samples.document_starts(index)
        boundaries = np.union1d([0, samples.seq_length], starts[starts < samples.seq_length])
        counts.update(np.diff(boundaries).tolist())
    return counts
