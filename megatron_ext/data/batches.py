"""What one rank reads in one micro-batch: index arithmetic, stacking, and the slice for its context-parallel rank."""

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
    """One micro-batch of one rank; t = T / cp_size consecutive positions of every sample.

    Attributes:
        tokens: int64 [b, t] inputs.
        labels: int64 [b, t], the token after each input.
        loss_mask: float32 [b, t], 1 where the label counts; see `Packing` for the first labels of documents.
        position_ids: int64 [b, t], position in the whole sequence, not in the slice; or in the document, see `Packing`.
        document_ids: int64 [b, t], the document of each label, -1 on padding; None for training.
        cu_seqlens: int32 [n + 1], where the n pieces of documents among the b * t inputs, row after row, begin, and
            b * t; None unless asked for. A row begins a piece, also where its document began before the slice.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device, but for `cu_seqlens`: who reads it on the CPU need not wait for a GPU."""
        parts = {name: part for name, part in vars(self).items() if part is not None}
        moved: dict[str, Any] = {name: _moved(part, device) for name, part in parts.items() if name != "cu_seqlens"}
        return Batch(**moved, cu_seqlens=self.cu_seqlens)


def _moved(part: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on another device; a GPU copies it beside what it is at, and the host does not wait."""
    if torch.device(device).type == "cuda":
        part = part.pin_memory()  # from other memory the copy is the host's work, in line with the GPU's
    return part.to(device, non_blocking=True)


@dataclass(frozen=True)
class Packing:
    """What a batch says of the documents that its samples are packed from.

    Attributes:
        boundaries: it has `cu_seqlens`.
        reset_positions: position ids begin at 0 with every document; one that began before its sample, with that.
        within_documents: a label that begins a document does not count: what stands before it is another document,
            which it must not be predicted from.
    """

    boundaries: bool = False
    reset_positions: bool = False
    within_documents: bool = False


NO_PACKING = Packing()


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


def training_batch(
    samples: TrainingSamples, indices: Sequence[int], cp_rank: int = 0, cp_size: int = 1, packing: Packing = NO_PACKING
) -> Batch:
    """Read training samples and keep this context-parallel rank's contiguous slice of them.

    Args:
        samples: where they are read from.
        indices: their b global indices.
        cp_rank: this rank among the context-parallel ones.
        cp_size: how many there are; divides the sequence length.
        packing: what it says of documents.

    Raises:
        ValueError: `cp_size` does not divide the sequence length.
    """
    part = _slice(samples.seq_length, cp_rank, cp_size)
    tokens = np.stack([samples[index] for index in indices])  # as they are stored: a quarter or half of int64
    positions, cu_seqlens, begins = _of_documents(samples, indices, part, packing)
    return Batch(
        tokens=_tensor(tokens[:, :-1][:, part], np.int64),
        labels=_tensor(tokens[:, 1:][:, part], np.int64),
        loss_mask=torch.ones(positions.shape) if begins is None else (~begins).float(),
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
    """Read evaluation samples, with the document of each label; see `training_batch`.

    Indices beyond the last sample give rows that are padding throughout and count for nothing.
    """
    part = _slice(samples.seq_length, cp_rank, cp_size)
    read = [samples[index] for index in indices]
    tokens = np.stack([item.tokens for item in read])
    positions, cu_seqlens, begins = _of_documents(samples, indices, part, packing)
    loss_mask = _tensor(np.stack([item.loss_mask[part] for item in read]))
    return Batch(
        tokens=_tensor(tokens[:, :-1][:, part]),
        labels=_tensor(tokens[:, 1:][:, part]),
        loss_mask=loss_mask if begins is None else loss_mask.masked_fill_(begins, 0.0),
        position_ids=positions,
        document_ids=_tensor(np.stack([item.document_ids[part] for item in read])),
        cu_seqlens=cu_seqlens,
    )


def _of_documents(
    samples: TrainingSamples | EvaluationSamples, indices: Sequence[int], part: slice, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Of a slice of every sample: positions [b, t]; `cu_seqlens`; which labels begin a document, bool [b, t].

    The last two are None where `packing` does not want them.
    """
    positions = torch.arange(part.start, part.stop).expand(len(indices), -1).contiguous()
    if packing == NO_PACKING:
        return positions, None, None
    found = [samples.document_starts(index) for index in indices]
    begins = None
    if packing.within_documents:
        begins = _tensor(np.stack([_first_labels(row, samples.seq_length)[part] for row in found]))
    starts = [np.union1d([0], row[row < samples.seq_length]) for row in found]
    if packing.reset_positions:
        positions = _tensor(np.stack([_positions(row, samples.seq_length) for row in starts])[:, part])
    return positions, torch.from_numpy(_cu_seqlens(starts, part)) if packing.boundaries else None, begins


def _first_labels(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
    """Which of a sample's labels are the first token of a document: bool [T]. The label of input t is token t + 1."""
    begins = np.zeros(length + 1, dtype=np.bool_)
    begins[starts] = True
    return begins[1:]


def _slice(length: int, cp_rank: int, cp_size: int) -> slice:
    """Positions of one context-parallel rank."""
    if length % cp_size:
        raise ValueError(f"a sequence of {length} does not divide by {cp_size} context-parallel ranks")
    return slice(cp_rank * length // cp_size, (cp_rank + 1) * length // cp_size)


def _cu_seqlens(starts: Sequence[npt.NDArray[np.int64]], part: slice) -> npt.NDArray[np.int32]:
    """Where documents begin in a slice of every row, which begins one itself: int32 [n + 1]."""
    size = part.stop - part.start
    rows = [
        row * size + np.concatenate([[0], found[(found > part.start) & (found < part.stop)] - part.start])
        for row, found in enumerate(starts)
    ]
    return np.concatenate([*rows, [len(starts) * size]]).astype(np.int32)


def _positions(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Position of each of a sample's inputs in its document: int64 [T]."""
    return np.arange(length) - np.repeat(starts, np.diff(np.append(starts, length)).astype(np.int64))


def _tensor(array: npt.NDArray[np.generic], dtype: type[np.generic] | None = None) -> torch.Tensor:
    """A contiguous tensor of its own memory; of another type where one is given."""
    return torch.from_numpy(np.array(array, dtype=dtype, order="C"))
