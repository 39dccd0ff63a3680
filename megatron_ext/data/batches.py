"""What one rank reads in one micro-batch: index arithmetic, stacking, and the slice for its context-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_ext.data.samples import EvaluationSamples, TrainingSamples


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; t = T / cp_size consecutive positions of every sample.

    Attributes:
        tokens: int64 [b, t] inputs.
        labels: int64 [b, t], the token after each input.
        loss_mask: float32 [b, t], 1 where the label counts.
        position_ids: int64 [b, t], position in the whole sequence, not in the slice.
        document_ids: int64 [b, t], the document of each label, -1 on padding; None for training.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        documents = None if self.document_ids is None else self.document_ids.to(device)
        return Batch(
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            loss_mask=self.loss_mask.to(device),
            position_ids=self.position_ids.to(device),
            document_ids=documents,
        )


def micro_batch_indices(
    step_first_sample: int, micro_batch: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Samples of one micro-batch on one data-parallel rank.

    A step reads [first, first + global_batch_size): micro-batch m on rank r is the (m * dp_size + r)-th run of
    `micro_batch_size` samples in it. The set is the same for every data-parallel size.

    Args:
        step_first_sample: global index of the step's first sample.
        micro_batch: number of the micro-batch within the step.
        micro_batch_size: samples in it on one rank.
        dp_rank: this rank among the data-parallel ones.
        dp_size: how many there are.
    """
    first = step_first_sample + (micro_batch * dp_size + dp_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


def training_batch(samples: TrainingSamples, indices: Sequence[int], cp_rank: int = 0, cp_size: int = 1) -> Batch:
    """Read training samples and keep this context-parallel rank's contiguous slice of them.

    Args:
        samples: where they are read from.
        indices: their b global indices.
        cp_rank: this rank among the context-parallel ones.
        cp_size: how many there are; divides the sequence length.

    Raises:
        ValueError: `cp_size` does not divide the sequence length.
    """
    tokens = np.stack([samples[index] for index in indices])
    return _batch(tokens, np.ones((len(indices), samples.seq_length), dtype=np.float32), None, cp_rank, cp_size)


def evaluation_batch(samples: EvaluationSamples, indices: Sequence[int], cp_rank: int = 0, cp_size: int = 1) -> Batch:
    """Read evaluation samples, with the document of each label; see `training_batch`.

    Indices beyond the last sample give rows that are padding throughout and count for nothing.
    """
    read = [samples[index] for index in indices]
    tokens, mask = np.stack([item.tokens for item in read]), np.stack([item.loss_mask for item in read])
    return _batch(tokens, mask, np.stack([item.document_ids for item in read]), cp_rank, cp_size)


def _batch(
    tokens: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.float32],
    document_ids: npt.NDArray[np.int64] | None,
    cp_rank: int,
    cp_size: int,
) -> Batch:
    """Cut [b, T + 1] tokens into inputs and labels, then both to the slice of one context-parallel rank."""
    length = tokens.shape[1] - 1
    if length % cp_size:
        raise ValueError(f"a sequence of {length} does not divide by {cp_size} context-parallel ranks")
    part = slice(cp_rank * length // cp_size, (cp_rank + 1) * length // cp_size)
    positions = np.broadcast_to(np.arange(length), (len(tokens), length))
    return Batch(
        tokens=_tensor(tokens[:, :-1][:, part]),
        labels=_tensor(tokens[:, 1:][:, part]),
        loss_mask=_tensor(loss_mask[:, part]),
        position_ids=_tensor(positions[:, part]),
        document_ids=None if document_ids is None else _tensor(document_ids[:, part]),
    )


def _tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """A contiguous tensor of its own memory."""
    return torch.from_numpy(np.array(array, order="C"))
