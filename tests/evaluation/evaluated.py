"""Functions that each rank of `test_evaluation_layouts.py` runs: build the model and evaluate it without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_prep.manifest import load_manifest
from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_ext.data.batches import evaluation_batch, micro_batch_indices, training_batch
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import TokenStore
from megatron_ext.evaluation.domains import DomainEvaluator, EvaluationDomain, evaluation_domains
from megatron_ext.evaluation.token_classes.building import ClassifierSource
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform.device import select_platform
from megatron_ext.runs.tokenizer import load_tokenizer
from megatron_ext.training.build import build_trainer
from megatron_ext.training.trainer import Trainer

LENGTH = 32


def _domains(root: Path, max_sequences: int) -> list[EvaluationDomain]:
    return evaluation_domains(root, load_manifest(root), ["First", "Second"], ["Other"], LENGTH, max_sequences)


def _trainer(root: Path, parallel: dict[str, Any], micro_batch_size: int) -> Trainer:
    config = derive(
        RunConfig(
            data=DataConfig(path=str(root), seq_length=LENGTH),
            # A large spread of initial weights makes losses differ from token to token.
            model=ModelConfig(
                pattern="attention,gated_deltanet,attention*2", hidden_size=32, num_attention_heads=4, init_std=0.3
            ),
            parallel=ParallelConfig(**parallel),
            training=TrainingConfig(precision="fp32", global_batch_size=12, micro_batch_size=micro_batch_size),
        )
    )
    platform = select_platform("cpu")
    shape = model_shape(config, platform, load_manifest(root).tokenizer.vocab_size)
    return build_trainer(config, shape, make_process_groups(config.parallel, 1), platform)


def class_source(root: Path) -> ClassifierSource:
    """Return the source of the classes of tokens of a prepared folder."""
    manifest = load_manifest(root)
    return ClassifierSource(
        root=root,
        manifest=manifest,
        train_domains=["First", "Second"],
        load_tokenizer=lambda: load_tokenizer(root / manifest.tokenizer.file, manifest.tokenizer),
        seq_length=LENGTH,
        device=torch.device("cpu"),
    )


def _evaluate(root: Path, trainer: Trainer, size: int, max_sequences: int = 0) -> list[dict[str, Any]]:
    domains = _domains(root, max_sequences)
    evaluator = DomainEvaluator(trainer, domains, size, class_source=class_source(root))
    return evaluator.evaluate(step=7, tokens=99, by_class=True)


def evaluate(
    rank: int, world_size: int, root: Path, parallel: dict[str, Any], micro_batch_size: int, max_sequences: int = 0
) -> list[dict[str, Any]]:
    """Return the records of an evaluation, as on every rank."""
    trainer = _trainer(root, parallel, micro_batch_size)
    return _evaluate(root, trainer, micro_batch_size, max_sequences)


def by_hand(rank: int, world_size: int, root: Path) -> dict[str, dict[int, list[tuple[float, int]]]]:
    """Return loss and offset in the stream of every token by domain and document, computed one sample at a time."""
    trainer = _trainer(root, {}, 1)
    found: dict[str, dict[int, list[tuple[float, int]]]] = {}
    for domain in _domains(root, 0):
        documents = found.setdefault(domain.name + "/" + domain.split, {})
        for index in range(len(domain.samples)):
            (losses_bt,) = trainer.losses([evaluation_batch(domain.samples, [index])])
            sample = domain.samples[index]
            for position in range(LENGTH):
                if sample.document_ids[position] >= 0:
                    loss_and_offset = float(losses_bt[0, position]), index * LENGTH + position + 1
                    documents.setdefault(int(sample.document_ids[position]), []).append(loss_and_offset)
    return found


def evaluate_and_train(
    rank: int, world_size: int, root: Path, parallel: dict[str, Any]
) -> tuple[list[dict[str, Any]], float, float]:
    """Evaluate, and compute the mean loss of a training batch as an evaluation and as an optimizer step do.

    Returns:
        Records of the evaluation, in micro-batches of three samples, and both mean losses.
    """
    trainer = _trainer(root, parallel, 3)
    evaluation = _evaluate(root, trainer, 3)
    samples = TrainingSamples(TokenStore(root, load_manifest(root), "train"), LENGTH, seed=1)
    groups = trainer.groups
    batches = [
        training_batch(
            samples,
            micro_batch_indices(0, number, 3, groups.dp.rank(), groups.dp.size()),
            groups.cp.rank(),
            groups.cp.size(),
        )
        for number in range(4 // groups.dp.size())
    ]
    sums = torch.zeros(2, dtype=torch.float64)
    for losses_bt in trainer.losses(batches):
        sums += torch.stack([losses_bt.double().sum(), torch.tensor(float(losses_bt.numel()))])
    loss, count = trainer.reduce(sums)
    return evaluation, float(loss / count), trainer.train_step(batches).loss
