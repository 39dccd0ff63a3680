"""Functions run by each rank to write a run folder for the conversion tests: a small, briefly trained model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parity
import torch
from torch import Tensor

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.load import resolve
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.groups import groups_of_one_process, make_process_groups
from megatron_ext.platform.device import select_platform
from megatron_ext.runs.identity import identity
from megatron_ext.training.build import build_trainer

VOCABULARY = 300
"""Vocabulary size. It is not a multiple of the padding, 128."""

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
STEPS = 2
PROGRESS = Progress(step=STEPS, samples=8 * STEPS, tokens=256 * STEPS)
SETTINGS: dict[str, dict[str, Any]] = {"top1_chunk": {"chunk_size": 8}, "mamba2": {"state_size": 16}}


def run_config(pattern: str, parallel: dict[str, Any], model: dict[str, Any], mixers: dict[str, Any]) -> Any:
    """Return a complete configuration. Initial weights are large, so that logits differ between tokens."""
    names = set(pattern.split("*")[0].split(","))
    used = {name: fields for name, fields in SETTINGS.items() if name in names} | mixers
    config = parity.run_config(pattern, used, {"init_std": 0.1, **model}, parallel, micro_batch_size=4)
    return resolve(config, load_all())


def save(
    rank: int,
    world_size: int,
    folder: Path,
    pattern: str,
    parallel: dict[str, Any],
    model: dict[str, Any],
    mixers: dict[str, Any],
    precision: str = "fp32",
) -> None:
    """Train two steps and save, as a run does."""
    config = run_config(pattern, parallel, model, mixers)
    train_and_save(folder, replace(config, training=replace(config.training, precision=precision)))


def train_and_save(folder: Path, config: Any) -> Any:
    """Train two steps and save. Return the trainer."""
    trainer, store = trainer_and_store(folder, config)
    for step in range(STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    store.save(trainer.optimizer, PROGRESS)
    return trainer


def trainer_and_store(folder: Path, config: Any) -> tuple[Any, CheckpointStore]:
    """Return a trainer and a store as a run builds them."""
    platform, groups = select_platform("cpu"), make_process_groups(config.parallel, 1)
    trainer = build_trainer(config, model_shape(config, platform, VOCABULARY), groups, platform)
    return trainer, CheckpointStore(folder / "checkpoints", identity_of(config), groups, platform)


def identity_of(config: Any) -> dict[str, Any]:
    """Return the identity of a run as its checkpoint records it."""
    manifest = SimpleNamespace(tokenizer=SimpleNamespace(sha256="0" * 64))
    data: Any = SimpleNamespace(train_domains=["a"], weights=None, manifest=manifest, vocab_size=VOCABULARY, record={})
    return identity(config, data)


@contextmanager
def loaded(
    folder: Path, pattern: str, model: dict[str, Any], mixers: dict[str, Any], multiple: int = 128
) -> Iterator[Any]:
    """Load the model of a run's newest checkpoint in one process with Megatron's loader, in fp32."""
    platform = select_platform("cpu")
    config = run_config(pattern, {}, {**model, "vocab_size_multiple": multiple}, mixers)
    with groups_of_one_process("gloo") as groups:
        (chunk,) = build_model(model_shape(config, platform, VOCABULARY), platform, groups, seed=99)
        store = CheckpointStore(folder / "checkpoints", {}, groups, platform)
        step = store.folder.latest()
        assert step is not None
        store.load_model([chunk], store.check(step))
        yield chunk.eval()


def parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters by name, without the vocabulary padding."""
    named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {name: p[:VOCABULARY] if name in PADDED else p for name, p in named.items()}


@torch.no_grad()
def logits(model: Any, tokens_bt: Tensor) -> Tensor:
    positions_bt = torch.arange(tokens_bt.shape[1]).expand_as(tokens_bt)
    logits_btv: Tensor = model(tokens_bt, positions_bt, attention_mask=None)[..., :VOCABULARY]
    return logits_btv


def tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))
