from collections import Counter

import numpy as np
import pytest
import torch

from megatron_ext.data.batches import Packing, evaluation_batch, micro_batch_indices, training_batch
from megatron_ext.data.lengths import document_lengths
from megatron_ext.data.samples import EvaluationSamples, TrainingSamples

T = 24


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("first", [0, 16, 5])
def test_samples_of_a_step_do_not_depend_on_the_ranks(dp_size, micro_batch_size, first):
    global_batch = 16
    read = [
        index
        for micro_batch in range(global_batch // (dp_size * micro_batch_size))
        for rank in range(dp_size)
        for index in micro_batch_indices(first, micro_batch, micro_batch_size, rank, dp_size)
    ]
    assert read == list(range(first, first + global_batch))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_tokens_of_a_step_do_not_depend_on_the_ranks(store, dp_size):
    samples = TrainingSamples(store, T, 1)
    read = [
        row
        for micro_batch in range(8 // (dp_size * 2))
        for rank in range(dp_size)
        for row in training_batch(samples, micro_batch_indices(40, micro_batch, 2, rank, dp_size)).tokens.tolist()
    ]
    assert sorted(read) == sorted(samples[i][:-1].tolist() for i in range(40, 48))


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_context_parallel_slices_cover_the_sample(store, cp_size):
    samples = TrainingSamples(store, T, 1)
    parts = [training_batch(samples, [3, 9], rank, cp_size) for rank in range(cp_size)]
    sequences = np.stack([samples[3], samples[9]]).astype(np.int64)
    wholes = {
        "tokens": torch.from_numpy(sequences[:, :-1]),
        "labels": torch.from_numpy(sequences[:, 1:]),
        "loss_mask": torch.ones(2, T),
        "position_ids": torch.arange(T).expand(2, T),
    }
    for name, whole in wholes.items():
        pieces = [getattr(part, name) for part in parts]
        assert all(piece.shape == (2, T // cp_size) and piece.is_contiguous() for piece in pieces)
        joined = torch.cat(pieces, dim=1)
        assert joined.dtype == whole.dtype
        assert torch.equal(joined, whole)
    assert all(part.document_ids is None for part in parts)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_documents_of_packed_samples(store, documents, cp_size):
    """Compare token by token with the documents as webdataset reads them."""
    length, indices = 240, [0, 1, 5, 2]  # each sample contains several documents
    samples = TrainingSamples(store, length, 1)
    in_document = [place for document in documents["train"] for place in range(len(document))]
    t = length // cp_size
    for rank in range(cp_size):
        batch = training_batch(samples, indices, rank, cp_size, Packing(boundaries=True, reset_positions=True))
        positions, begins = [], []
        for row, index in enumerate(indices):
            start = samples.token_offset(index)
            for place in range(rank * t, (rank + 1) * t):
                positions.append(min(place, in_document[start + place]))
                if place == rank * t or in_document[start + place] == 0:
                    begins.append(row * t + place - rank * t)
        assert batch.position_ids.flatten().tolist() == positions
        assert batch.position_ids.is_contiguous()
        assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype) == ([*begins, 4 * t], torch.int32)
        plain = training_batch(samples, indices, rank, cp_size)
        assert plain.cu_seqlens is None
        assert torch.equal(plain.tokens, batch.tokens)
        assert torch.equal(plain.position_ids, torch.arange(rank * t, (rank + 1) * t).expand(4, t))
    assert len(begins) > 4
    alone = training_batch(samples, indices, packing=Packing(boundaries=True))
    assert torch.equal(alone.position_ids[0], torch.arange(length))


def test_lengths_of_documents_in_samples(store, documents):
    length, indices = 48, [0, 7, 3]
    samples = TrainingSamples(store, length, 1)
    numbers = np.repeat(np.arange(len(documents["train"])), [len(document) for document in documents["train"]])
    expected = Counter()
    for index in indices:
        place = samples.token_offset(index)
        expected.update(np.unique(numbers[place : place + length], return_counts=True)[1].tolist())
    assert document_lengths(samples, indices) == expected
    assert sum(n * count for n, count in expected.items()) == 3 * length


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("kind", [TrainingSamples, EvaluationSamples])
def test_first_labels_of_documents_are_masked(store, documents, kind, cp_size):
    """Compare the loss mask token by token, including a sample's last label, which is not among its inputs."""
    length = 48
    samples = TrainingSamples(store, length, 1) if kind is TrainingSamples else EvaluationSamples(store, length)
    begins = {0, *np.cumsum([len(document) for document in documents["train"]]).tolist()}
    indices = list(range(12))
    read = training_batch if kind is TrainingSamples else evaluation_batch
    place = samples.token_offset if kind is TrainingSamples else lambda index: index * length
    expected = [[float(place(index) + t + 1 not in begins) for t in range(length)] for index in indices]
    parts = [read(samples, indices, rank, cp_size, Packing(within_documents=True)) for rank in range(cp_size)]
    mask = torch.cat([part.loss_mask for part in parts], dim=1)
    assert (mask.tolist(), mask.dtype) == (expected, torch.float32)
    assert 0 in mask[:, :-1]
    assert all(part.cu_seqlens is None for part in parts)
    assert torch.equal(parts[0].position_ids[0], torch.arange(length // cp_size))
    assert read(samples, indices).loss_mask.all()


def test_last_label_may_begin_a_document(store, documents):
    length = len(documents["train"][0])
    sample = evaluation_batch(EvaluationSamples(store, length), [0], packing=Packing(True, True, True))
    assert sample.loss_mask[0].tolist() == [1.0] * (length - 1) + [0.0]
    assert sample.cu_seqlens.tolist() == [0, length]
    assert sample.position_ids[0].tolist() == list(range(length))


def test_evaluation_batch(store):
    samples = EvaluationSamples(store, T)
    last = len(samples) - 1
    parts = [evaluation_batch(samples, [0, last, last + 1], rank, 2) for rank in range(2)]
    items = [samples[0], samples[last], samples[last + 1]]
    for name in ("loss_mask", "document_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(joined, torch.from_numpy(np.stack([getattr(item, name) for item in items])))
    assert torch.equal(
        torch.cat([part.labels for part in parts], 1), torch.tensor([i.tokens[1:].tolist() for i in items])
    )
    assert 0 < parts[0].loss_mask[1].sum() + parts[1].loss_mask[1].sum() <= T
    assert not parts[0].loss_mask[2].any()


def test_documents_of_evaluation_samples(store, documents):
    length = 240
    samples = EvaluationSamples(store, length)
    indices = [1, len(samples) - 1, len(samples)]  # the last is all padding, the one before it ends in padding
    batch = evaluation_batch(samples, indices, packing=Packing(boundaries=True, reset_positions=True))
    firsts = np.cumsum([0, *map(len, documents["train"])])[:-1]
    begins = []
    for row, index in enumerate(indices):
        found = {int(first) - index * length for first in firsts} & set(range(length))
        begins += [row * length + place for place in sorted({0, *found})]
    assert len(begins) > 3
    assert batch.cu_seqlens.tolist() == [*begins, 3 * length]
    assert batch.position_ids.flatten()[begins].tolist() == [0] * len(begins)
    assert int(batch.position_ids[2, -1]) == length - 1


def test_batch_to_another_device(store):
    batch = evaluation_batch(EvaluationSamples(store, T), [0]).to("meta")
    assert {part.device.type for part in vars(batch).values() if part is not None} == {"meta"}
    assert batch.document_ids is not None
    packed = training_batch(TrainingSamples(store, T, 0), [0], packing=Packing(boundaries=True))
    assert packed.to("cpu").document_ids is None
    assert packed.to("meta").cu_seqlens.shape == packed.cu_seqlens.shape


def test_indivisible_sequence(store):
    with pytest.raises(ValueError, match="sequence length 24 is not divisible by 5"):
        training_batch(TrainingSamples(store, T, 0), [0], 0, 5)


@pytest.mark.parametrize("count", [1, 3])
def test_batch_tensors_share_no_memory(store, count):
    samples, names = TrainingSamples(store, T, 1), ("tokens", "labels", "loss_mask", "position_ids")
    original = training_batch(samples, range(count))
    for name in names:
        changed = training_batch(samples, range(count))
        getattr(changed, name).fill_(-7)
        others = [other for other in names if other != name]
        assert all(torch.equal(getattr(changed, other), getattr(original, other)) for other in others)
        assert not torch.equal(getattr(changed, name), getattr(original, name))
