"""Sums of losses by class of token and document over the batches of one domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_ext.data.samples import EvaluationSamples
from megatron_ext.evaluation.token_classes.classifier import TokenClassifier

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class ClassSums:
    """Sums of one rank over one domain.

    Args:
        classifier: classifier of tokens.
        samples: windows of the domain.
    """

    def __init__(self, classifier: TokenClassifier, samples: EvaluationSamples) -> None:
        self._classifier, self._samples = classifier, samples
        self._parts: list[tuple[IntArray, FloatArray]] = []

    def add(
        self, indices: Sequence[int], first: int, is_label: torch.Tensor, documents: IntArray, losses: FloatArray
    ) -> None:
        """Add the losses of a batch.

        Args:
            indices: windows of its b rows. Classes follow from whole windows, whatever part of them this rank computes.
            first: offset in the window of the first label of the batch's rows.
            is_label: bool [b, t], labels that count.
            documents: int64 [n], document of each of these labels in row-major order.
            losses: float64 [n], their losses in nats.
        """
        if not len(documents):
            return
        length = is_label.shape[1]
        rows = [self._classes(index)[:, first : first + length] for index in indices]
        classes_gn = np.stack(rows, axis=1)[:, is_label.numpy()]
        unique, local = np.unique(documents, return_inverse=True)
        keys = (classes_gn * len(unique) + local).ravel()
        # One bin more than there are classes, for tokens without a class of a group.
        bins = (len(self._classifier.names) + 1) * len(unique)
        nats = np.bincount(keys, np.tile(losses, len(classes_gn)), minlength=bins)
        counts = np.bincount(keys, minlength=bins).astype(np.float64)
        self._parts.append((unique, np.stack([nats, counts]).reshape(2, -1, len(unique))[:, :-1]))

    def _classes(self, index: int) -> IntArray:
        """Return the classes of a window's labels, int64 [groups, T]; padding has none."""
        sample = self._samples[index]
        num_labels = int(sample.loss_mask.sum())
        starts = self._samples.document_starts(index)
        classes_gn = self._classifier.classify(sample.tokens[: num_labels + 1], starts)
        padding = ((0, 0), (0, self._samples.seq_length - num_labels))
        return np.pad(classes_gn, padding, constant_values=len(self._classifier.names))

    def dense(self, documents: IntArray) -> torch.Tensor:
        """Return sums and numbers of tokens, float64 [2, classes, documents].

        Args:
            documents: int64, ascending ids of documents, including all that were added.
        """
        total = np.zeros((2, len(self._classifier.names), len(documents)))
        for part_documents, part in self._parts:
            total[:, :, np.searchsorted(documents, part_documents)] += part
        return torch.from_numpy(total)

    def record(self, total: torch.Tensor) -> dict[str, Any]:
        """Return the field `classes` of an evaluation's record; classes without tokens are left out.

        Args:
            total: float64 [2, classes, documents], sums over all ranks.
        """
        return {
            name: {
                "document_loss": [round(value, 4) for value in nats.tolist()],
                "document_tokens": counts.to(torch.int64).tolist(),
            }
            for name, nats, counts in zip(self._classifier.names, *total, strict=True)
            if counts.any()
        }
