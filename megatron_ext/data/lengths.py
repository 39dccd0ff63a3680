"""How long the documents are that a model sees apart, in packed samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

SAMPLES = 64
"""Samples of the order's beginning that stand for all: with 2,048 tokens each some 130,000."""


class PackedSamples(Protocol):
    """Samples that know where their documents begin; see `TrainingSamples`."""

    seq_length: int

    def document_starts(self, index: int) -> npt.NDArray[np.int64]:
        """Which of the T + 1 tokens of a sample are the first of a document."""
        ...


def document_lengths(samples: PackedSamples, indices: Sequence[int] = range(SAMPLES)) -> Counter[int]:
    """How many pieces of documents of each length the inputs of some samples are.

    Args:
        samples: of a run.
        indices: which of them.
    """
    found: Counter[int] = Counter()
    for index in indices:
        starts = samples.document_starts(index)
        edges = np.union1d([0, samples.seq_length], starts[starts < samples.seq_length])
        found.update(np.diff(edges).tolist())
    return found
