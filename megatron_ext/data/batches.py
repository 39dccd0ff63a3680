"""Micro-batches of one rank: sample indices, stacking, and the slice of its context-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_ext.data.samples import EvaluationSamples, TrainingSamples


@dataclass(frozen=True)
class Batch:
    """Micro-batch of one rank, with t = T / cp_size consecutive positions of every sample.

    Attributes:
        tokens: int64 [b, t], inputs.
        labels: int64 [b, t], the token after each input.
        loss_mask: float32 [b, t], 1 where the label counts in the loss. First tokens of documents are masked if
            `Packing.within_documents` is on.
        position_ids: int64 [b, t], position in the whole sequence rather than in the slice, or position in the document
            if `Packing.reset_positions` is on.
        document_ids: int64 [b, t], document index of each label, -1 on padding. None for training.
        cu_seqlens: int32 [n + 1], start of each of the n document pieces among the b * t inputs in row-major order,
            then b * t. Every row starts a new piece, even within a document. None if `Packing.boundaries` is off.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to another device. `cu_seqlens` stays on the CPU, where code reads it without a GPU sync."""
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        copied: dict[str, Any] = {
            name: _copy_to(tensor, device) for name, tensor in tensors.items() if name != "cu_seqlens"
        }
        return Batch(**copied, cu_seqlens=self.cu_seqlens)


def _copy_to(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on another device. Copies to a GPU are asynchronous."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would block the host
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Packing:
    """Document information in a batch of packed samples.

    Attributes:
        boundaries: provide `cu_seqlens`.
        reset_positions: restart position ids at 0 with every document. The positions of a document that began in an
            earlier sample restart at the beginning of this sample.
        within_documents: mask labels that are the first token of a document, because their context is another document.
    """

    boundaries: bool = False
    reset_positions: bool = False
    within_documents: bool = False


NO_PACKING = Packing()


def micro_batch_indices(
    step_first_sample: int, micro_batch: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Return the sample indices of one micro-batch on one data-parallel rank.

    A step reads samples [first, first + global_batch_size). Micro-batch m on rank r is the (m * dp_size + r)-th block
    of `micro_batch_size` samples in this range. A step's set of samples is independent of the data-parallel size.

    Args:
        step_first_sample: global index of the step's first sample.
        micro_batch: index of the micro-batch within the step.
        micro_batch_size: samples per micro-batch on one rank.
        dp_rank: data-parallel rank.
        dp_size: data-parallel size.
    """
    first = step_first_sample + (micro_batch * dp_size + dp_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


def training_batch(
    samples: TrainingSamples, indices: Sequence[int], cp_rank: int = 0, cp_size: int = 1, packing: Packing = NO_PACKING
) -> Batch:
    """Read training samples and keep the contiguous slice of this context-parallel rank.

    Args:
        samples: source of the samples.
        indices: global indices of the b samples.
        cp_rank: context-parallel rank.
        cp_size: context-parallel size. Divides the sequence length.
        packing: document information to provide.

    Raises:
        ValueError: `cp_size` does not divide the sequence length.
    """
    cp_slice = _slice(samples.seq_length, cp_rank, cp_size)
    tokens = np.stack([samples[index] for index in indices])  # stored as uint16 or uint32, smaller than int64
    positions, cu_seqlens, is_first_label = _document_info(samples, indices, cp_slice, packing)
    return Batch(
        tokens=_tensor(tokens[:, :-1][:, cp_slice], np.int64),
        labels=_tensor(tokens[:, 1:][:, cp_slice], np.int64),
        loss_mask=torch.ones(positions.shape) if is_first_label is None else (~is_first_label).float(),
        position_ids=positions,
        cu_seqlens=cu_seqlens,
    )


def evaluation_batch(
    samples: EvaluationSamples,
    indices: Sequence[int],
    cp_rank: int = 0,
    cp_size: int = 1,
    packing: Packing = NO_PACKING,
) -> Batch:
    """Read evaluation samples with the document of each label. Arguments are as for `training_batch`.

    An index beyond the last sample gives a row of padding with a loss mask of 0.
    """
    cp_slice = _slice(samples.seq_length, cp_rank, cp_size)
    items = [samples[index] for index in indices]
    tokens = np.stack([item.tokens for item in items])
    positions, cu_seqlens, is_first_label = _document_info(samples, indices, cp_slice, packing)
    loss_mask = _tensor(np.stack([item.loss_mask[cp_slice] for item in items]))
    return Batch(
        tokens=_tensor(tokens[:, :-1][:, cp_slice]),
        labels=_tensor(tokens[:, 1:][:, cp_slice]),
        loss_mask=loss_mask if is_first_label is None else loss_mask.masked_fill_(is_first_label, 0.0),
        position_ids=positions,
        document_ids=_tensor(np.stack([item.document_ids[cp_slice] for item in items])),
        cu_seqlens=cu_seqlens,
    )


def _document_info(
    samples: TrainingSamples | EvaluationSamples, indices: Sequence[int], cp_slice: slice, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return document information for a slice of every sample.

    Returns:
        Positions int64 [b, t], `cu_seqlens`, and a mask of the labels that begin a document, bool [b, t]. The last two
            are None if `packing` does not request them.
    """
    positions = torch.arange(cp_slice.start, cp_slice.stop).expand(len(indices), -1).contiguous()
    if packing == NO_PACKING:
        return positions, None, None
    document_starts = [samples.document_starts(index) for index in indices]
    is_first_label = None
    if packing.within_documents:
        masks = [_first_labels(row, samples.seq_length)[cp_slice] for row in document_starts]
        is_first_label = _tensor(np.stack(masks))
    starts = [np.union1d([0], row[row < samples.seq_length]) for row in document_starts]
    if packing.reset_positions:
        positions = _tensor(np.stack([_positions(row, samples.seq_length) for row in starts])[:, cp_slice])
    return positions, torch.from_numpy(_cu_seqlens(starts, cp_slice)) if packing.boundaries else None, is_first_label


def _first_labels(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
    """Mask the labels that begin a document: bool [T]. The label of input t is token t + 1."""
    is_first_label = np.zeros(length + 1, dtype=np.bool_)
    is_first_label[starts] = True
    return is_first_label[1:]


def _slice(length: int, cp_rank: int, cp_size: int) -> slice:
    """Return the slice of sequence positions of one context-parallel rank."""
    if length % cp_size:
        raise ValueError(f"sequence length {length} is not divisible by {cp_size} context-parallel ranks")
    return slice(cp_rank * length // cp_size, (cp_rank + 1) * length // cp_size)


def _cu_seqlens(starts: Sequence[npt.NDArray[np.int64]], cp_slice: slice) -> npt.NDArray[np.int32]:
    """Return `Batch.cu_seqlens` for the slice `cp_slice` of every row: int32 [n + 1].

    Args:
        starts: per row, the ascending offsets of first tokens of documents, including 0.
        cp_slice: slice of the context-parallel rank.
    """
    first, end = cp_slice.start, cp_slice.stop
    size = end - first
    rows = [
        row * size + np.concatenate([[0], row_starts[(row_starts > first) & (row_starts < end)] - first])
        for row, row_starts in enumerate(starts)
    ]
    return np.concatenate([*rows, [len(starts) * size]]).astype(np.int32)


def _positions(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Return the position of each input in its document: int64 [T]."""
    return np.arange(length) - np.repeat(starts, np.diff(np.append(starts, length)).astype(np.int64))


def _tensor(array: npt.NDArray[np.generic], dtype: type[np.generic] | None = None) -> torch.Tensor:
    """Copy an array into a contiguous tensor, optionally with another dtype."""
    return torch.from_numpy(np.array(array, dtype=dtype, order="C"))
