"""Example of `docs/extending/optimizer.md`, run as it is printed, and the registry of optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from extending import code_blocks
from torch import Tensor

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_ext.data.batches import Batch
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.optim import registry
from megatron_ext.platform.device import Platform
from megatron_ext.training.build import build_trainer
from megatron_ext.training.trainer import Trainer
from megatron_ext.utils.errors import UserError

CPU = Platform(torch.device("cpu"), "gloo")
VOCABULARY, LENGTH, SAMPLES, STEPS = 64, 16, 2, 4
RATE, DECAY, BETAS = 1e-2, 0.1, (0.8, 0.9)


@pytest.fixture
def lion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the example for one test."""
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.load_all()))
    (code,) = code_blocks("optimizer.md")
    exec(compile(code, "optimizer.md", "exec"), {"__name__": "lion"})


def _config(sharding: Any, seed: int) -> RunConfig:
    return derive(
        RunConfig(
            data=DataConfig(path="none", seq_length=LENGTH),
            model=ModelConfig(pattern="attention,gla", hidden_size=32, num_attention_heads=2, ffn_hidden_size=32),
            training=TrainingConfig(
                precision="fp32", global_batch_size=SAMPLES, micro_batch_size=SAMPLES, steps=STEPS, seed=seed
            ),
            optimizer=OptimizerConfig(
                name="lion",
                sharding=sharding,
                lr=RATE,
                min_lr=RATE,
                schedule="constant",
                weight_decay=DECAY,
                betas=list(BETAS),
                clip_grad=0.0,
            ),
        )
    )


def _trainer(groups: Any, sharding: str, seed: int = 5) -> Trainer:
    config = _config(sharding, seed)
    return build_trainer(config, model_shape(config, CPU, VOCABULARY), groups, CPU)


def _batch(step: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(SAMPLES, LENGTH), positions)


def _plain(groups: Any) -> dict[str, Tensor]:
    """Train the bare model by the formulas of Lion's paper and return its parameters."""
    config = _config("none", 5)
    (model,) = build_model(model_shape(config, CPU, VOCABULARY), CPU, groups, 5)
    parameters = dict(model.named_parameters())
    momenta = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step in range(STEPS):
        batch = _batch(step)
        losses = model(batch.tokens, batch.position_ids, attention_mask=None, labels=batch.labels)
        gradients = torch.autograd.grad(losses.mean(), list(parameters.values()))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                decay = DECAY if p.dim() > 1 and not name.endswith("decay_bias") else 0.0
                update = torch.sign(BETAS[0] * momenta[name] + (1 - BETAS[0]) * g)
                momenta[name] = BETAS[1] * momenta[name] + (1 - BETAS[1]) * g
                p.copy_(p - RATE * (update + decay * p))
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
@pytest.mark.usefixtures("lion")
def test_documented_example_trains_and_resumes(one_process: Any, tmp_path: Path, sharding: str) -> None:
    first, half = _trainer(one_process, sharding), STEPS // 2
    for step in range(half):
        first.train_step([_batch(step)])
    store = CheckpointStore(tmp_path, {}, one_process, CPU)
    store.save(first.optimizer, Progress(half, half * SAMPLES, half * SAMPLES * LENGTH))
    store.wait()
    second = _trainer(one_process, sharding, seed=6)
    store.load(second.optimizer, store.check(half))
    for step in range(half, STEPS):
        second.train_step([_batch(step)])
    (chunk,) = second.optimizer.chunks
    expected = _plain(one_process)
    with second.optimizer.gathered_parameters():
        for name, parameter in chunk.module.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adam"}, "optimizer.name.*'adam'.*did you mean adamw"),
        ({"name": "lion", "sharding": "megatron"}, "optimizer.sharding.*megatron.*none, zero1, zero2, zero3"),
    ],
)
@pytest.mark.usefixtures("lion")
def test_unknown_names_and_shardings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        registry.algorithm_of(OptimizerConfig(**fields))
