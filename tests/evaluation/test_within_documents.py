"""Losses with `data.reset_attention`, compared with the bare model on each document alone.

No label that begins a document counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import evaluated
import numpy as np
import pytest
import torch
from corpora import prepared

from data_prep.manifest import Manifest, load_manifest
from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_ext.data.batches import training_batch
from megatron_ext.data.datasets import packing_from_config
from megatron_ext.data.lengths import NUM_SAMPLES
from megatron_ext.data.samples import EvaluationSamples, TrainingSamples
from megatron_ext.data.shards import TokenStore
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses
from megatron_ext.evaluation.domains import DomainEvaluator, EvaluationDomain
from megatron_ext.model.shape import model_shape
from megatron_ext.platform.device import select_platform
from megatron_ext.runs.tokenizer import load_tokenizer
from megatron_ext.training.build import build_trainer
from megatron_ext.training.model_size import flops_and_peak
from megatron_ext.training.trainer import Trainer

LENGTH = 32
MODEL = ModelConfig(pattern="attention,gated_deltanet", hidden_size=32, num_attention_heads=4, init_std=0.3)
DATA = DataConfig(path="prepared", seq_length=LENGTH, reset_attention=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with documents of a few tokens: several in a sample, some of them spanning two samples."""
    return prepared(tmp_path_factory.mktemp("documents"), documents=60, words=(1, 12))


@pytest.fixture
def manifest(root: Path) -> Manifest:
    """Manifest of the data in `root`."""
    return load_manifest(root)


@pytest.fixture
def trainer(manifest: Manifest, one_process: Any) -> Trainer:
    """Trainer of a small model with documents kept apart and learning rate 0."""
    config = derive(
        RunConfig(
            data=DATA,
            model=MODEL,
            training=TrainingConfig(precision="fp32", global_batch_size=4, micro_batch_size=2),
        )
    )
    platform = select_platform("cpu")
    return build_trainer(config, model_shape(config, platform, manifest.tokenizer.vocab_size), one_process, platform)


def _pieces(store: TokenStore, start: int, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the tokens of each document within a range of the stream."""
    tokens, documents = store.read(start, length).astype(np.int64), store.document_ids(start, length)
    for document in np.unique(documents):
        yield int(document), tokens[documents == document]


def _losses(trainer: Trainer, tokens: np.ndarray) -> torch.Tensor:
    """Return the losses of a document's tokens after the first one, read as a separate sample."""
    (model,) = trainer.chunks
    read = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        found: torch.Tensor = model(
            read[:, :-1], torch.arange(len(tokens) - 1)[None], attention_mask=None, labels=read[:, 1:]
        )
    return found[0].double()


def test_losses_by_domain(trainer: Trainer, root: Path, manifest: Manifest) -> None:
    store = TokenStore(root, manifest, "test", ["Other"])
    samples = EvaluationSamples(store, LENGTH)
    domain = EvaluationDomain("Other", "test", samples, store.num_documents)
    source = evaluated.class_source(root)
    evaluator = DomainEvaluator(trainer, [domain], 2, packing_from_config(DATA), class_source=source)
    (record,) = evaluator.evaluate(1, 2, by_class=True)
    nats: dict[int, list[float]] = {}
    for start in range(0, store.num_tokens - 1, LENGTH):
        for document, tokens in _pieces(store, start, min(LENGTH + 1, store.num_tokens - start)):
            if len(tokens) > 1:
                nats.setdefault(document, []).extend(_losses(trainer, tokens).tolist())
    assert record["documents"] == sorted(nats)
    assert record["document_tokens"] == [len(nats[document]) for document in sorted(nats)]
    assert record["document_loss"] == pytest.approx([sum(nats[d]) for d in sorted(nats)], abs=2e-4)
    assert record["num_tokens"] == sum(map(len, nats.values())) == store.num_tokens - store.num_documents
    assert record["first_tokens"] == store.num_documents - 1
    assert record["loss"] == pytest.approx(sum(map(sum, nats.values())) / record["num_tokens"], abs=1e-5)
    assert "position/0" not in record["classes"]  # a first token has no loss
    for group in ("token", "bigram", "text", "training", "position"):
        sums = [found for name, found in record["classes"].items() if name.startswith(f"{group}/")]
        assert np.sum([found["document_tokens"] for found in sums], axis=0).tolist() == record["document_tokens"]
        nats = np.sum([found["document_loss"] for found in sums], axis=0)
        assert nats == pytest.approx(record["document_loss"], abs=2e-3)
    packing = replace(packing_from_config(DATA), within_documents=False)
    (without,) = DomainEvaluator(trainer, [domain], 2, packing).evaluate(1, 2)
    assert (without["num_tokens"], without["first_tokens"]) == (store.num_tokens - 1, 0)
    assert without["loss"] != pytest.approx(record["loss"], abs=1e-3)


def test_training_steps(trainer: Trainer, root: Path, manifest: Manifest) -> None:
    store = TokenStore(root, manifest, "train")
    samples = TrainingSamples(store, LENGTH, seed=1)
    pieces = [
        tokens
        for index in range(4)
        for _, tokens in _pieces(store, samples.token_offset(index), LENGTH + 1)
        if len(tokens) > 1
    ]
    expected = torch.cat([_losses(trainer, tokens) for tokens in pieces])
    batches = [training_batch(samples, indices, packing=packing_from_config(DATA)) for indices in ([0, 1], [2, 3])]
    result = trainer.train_step(batches)
    assert (result.tokens, result.predicted) == (4 * LENGTH, len(expected))
    assert len(expected) < 4 * LENGTH - 4
    assert result.loss == pytest.approx(float(expected.mean()), abs=1e-5)


def test_utilisation_counts_pairs_within_documents(trainer: Trainer, root: Path, manifest: Manifest) -> None:
    samples = TrainingSamples(TokenStore(root, manifest, "train"), LENGTH, seed=1)
    config = derive(RunConfig(data=DATA, model=MODEL))
    shape = model_shape(config, trainer.platform, manifest.tokenizer.vocab_size)
    found, _ = flops_and_peak(config, shape, trainer, samples)
    without, _ = flops_and_peak(replace(config, data=replace(DATA, reset_attention=False)), shape, trainer, samples)
    bounds = [np.union1d(s[s < LENGTH], [0, LENGTH]) for s in map(samples.document_starts, range(NUM_SAMPLES))]
    lengths = np.concatenate([np.diff(one) for one in bounds])
    pairs = (lengths * (lengths + 1) / 2).sum() / lengths.sum()
    # A query-key pair takes 4 operations per channel in the forward pass, three times that with the backward pass.
    assert without - found == pytest.approx(3 * 4 * 32 * ((LENGTH + 1) / 2 - pairs), rel=1e-9)
    assert pairs < LENGTH / 4


def test_bytes_that_are_not_predicted_do_not_count(root: Path, manifest: Manifest) -> None:
    """Compare with the texts, without their first tokens."""
    (entry,) = manifest.select("test", ["Other"])
    tokenizer = load_tokenizer(root / manifest.tokenizer.file, manifest.tokenizer)
    texts = [json.loads(line) for line in (root.parent / "raw.jsonl").open()]
    cut = [tokenizer.encode(one["text"])[1:] for one in texts if one["meta"]["redpajama_set_name"] == "Other"]
    size = sum(len(tokenizer.decode(tokens).encode()) for tokens in cut)
    samples = EvaluationSamples(TokenStore(root, manifest, "test", ["Other"]), LENGTH)
    record = {
        "domain": "Other",
        "split": "test",
        "loss": 2.5,
        "num_tokens": sum(len(tokens) + 1 for tokens in cut),  # with the end-of-document tokens
        "first_tokens": len(cut) - 1,
        "document_loss": [1.0, 2.0],
        "document_tokens": [1, 2],
    }
    options = DomainOptions(resamples=20)
    first_bytes = tokenizer.count_bytes(samples.first_tokens().tolist())
    (found,) = domain_losses([record], manifest, options, lambda _: first_bytes)
    assert found.bits_per_byte == pytest.approx(2.5 * record["num_tokens"] / size / math.log(2), rel=1e-12)
    assert found.first_tokens == len(cut) - 1
    assert size < entry.bytes - len(cut)
    (part,) = domain_losses([record | {"num_tokens": 9}], manifest, options, lambda _: 0)
    assert part.bits_per_byte is None
