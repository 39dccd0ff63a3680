"""Samples of 2k to 1M tokens that span many shards, compared with the concatenated source documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from datatrove.data import Document

from data_prep.manifest import Manifest, TokenizerEntry
from data_prep.output.shards import DomainWriter
from megatron_ext.data.batches import training_batch
from megatron_ext.data.order import sample_positions
from megatron_ext.data.samples import EvaluationSamples, TrainingSamples
from megatron_ext.data.shards import TokenStore

LONGEST = 2**20
LENGTHS = [2**11, LONGEST]
VOCABULARY = 100_000  # does not fit 16 bits
SHARD = 250_000
Written = tuple[TokenStore, list[npt.NDArray[np.uint32]], list[str]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a store of two domains, its documents and the names of its shards.

    Documents have from one token to more than a shard.
    """
    root, dice = tmp_path_factory.mktemp("long"), np.random.default_rng(4)
    documents: list[npt.NDArray[np.uint32]] = []
    entries = []
    for domain, tokens in (("Books", 2 * LONGEST + 12_345), ("Code", LONGEST + 6_789)):
        writer = DomainWriter(root, "train", domain, SHARD)
        while writer.tokens < tokens:
            length = min(int(10 ** dice.uniform(0, 5.6)), tokens - writer.tokens)
            documents.append(dice.integers(VOCABULARY, size=length, dtype=np.uint32))
            writer.add(Document(text="", id=str(len(documents)), metadata={"source": "dice"}), documents[-1])
        entries.append(writer.close())
    tokenizer = TokenizerEntry("tokenizer.json", "0" * 64, VOCABULARY, "<|endoftext|>", 0)
    shards = [shard.file for entry in entries for shard in entry.shards]
    return TokenStore(root, Manifest(1, tokenizer, "uint32", entries), "train"), documents, shards


@pytest.mark.parametrize("length", LENGTHS)
def test_training_samples_are_windows_of_the_stream(written: Written, length: int) -> None:
    store, documents, shards = written
    stream = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents)])
    samples = TrainingSamples(store, length, seed=11)
    assert samples.num_windows == (len(stream) - 1) // length
    order = sample_positions(11, np.arange(samples.num_windows), samples.num_windows).tolist()
    assert sorted(order) == list(range(samples.num_windows))
    for index, window in enumerate(order):
        first = window * length
        assert np.array_equal(samples[index], stream[first : first + length + 1])
        expected_starts = starts[(starts >= first) & (starts <= first + length)] - first
        assert np.array_equal(samples.document_starts(index), expected_starts)
    ranges = [store.shard_range(file) for file in shards]
    spanned = [sum(a < (w + 1) * length and w * length < a + n for a, n in ranges) for w in order]
    assert min(spanned) >= (3 if length == LONGEST else 1), "the longest samples are of several shards each"
    assert max(spanned) >= 2


@pytest.mark.parametrize("cp_size", [1, 8])
def test_context_parallel_slices_of_the_longest_sample(written: Written, cp_size: int) -> None:
    store, documents, _ = written
    stream = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    samples = TrainingSamples(store, LONGEST, seed=11)
    first = int(sample_positions(11, np.arange(1), samples.num_windows)[0]) * LONGEST
    parts = [training_batch(samples, [0], rank, cp_size) for rank in range(cp_size)]
    assert {part.tokens.shape for part in parts} == {(1, LONGEST // cp_size)}
    assert torch.equal(torch.cat([part.tokens for part in parts], dim=1)[0], stream[first : first + LONGEST])
    assert torch.equal(torch.cat([part.labels for part in parts], dim=1)[0], stream[first + 1 : first + LONGEST + 1])


@pytest.mark.parametrize("length", LENGTHS)
def test_evaluation_reads_every_token_once(written: Written, length: int) -> None:
    store, documents, _ = written
    stream = np.concatenate(documents)
    ids = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    samples = EvaluationSamples(store, length)
    assert len(samples) == -(-(len(stream) - 1) // length)
    read = [samples[index] for index in range(len(samples))]
    assert {one.tokens.shape for one in read} == {(length + 1,)}
    real = [one.loss_mask == 1 for one in read]
    labels = np.concatenate([one.tokens[1:][mask] for one, mask in zip(read, real, strict=True)])
    assert np.array_equal(labels, stream[1:])
    found = np.concatenate([one.document_ids[mask] for one, mask in zip(read, real, strict=True)])
    assert np.array_equal(found, ids[1:])
