"""What one rank does to make a run's folder for the conversion tests: a small model, trained a little, and saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parity

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.load import resolve
from megatron_ext.mixers.registry import load_all
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform import select_platform
from megatron_ext.training.build import build_trainer, model_shape
from megatron_ext.training.run import identity

VOCABULARY = 300
"""No multiple of the padding, 128."""

STEPS = 2
PROGRESS = Progress(step=STEPS, samples=8 * STEPS, tokens=256 * STEPS)
SETTINGS: dict[str, dict[str, Any]] = {"top1_chunk": {"chunk_size": 8}, "mamba2": {"state_size": 16}}


def run_config(pattern: str, parallel: dict[str, Any], model: dict[str, Any], mixers: dict[str, Any]) -> Any:
    """The configuration of a run, whole; its initial weights are wide, so that logits differ from token to token."""
    names = set(pattern.split("*")[0].split(","))
    used = {name: fields for name, fields in SETTINGS.items() if name in names} | mixers
    config = parity.run_config(pattern, used, {"init_std": 0.1, **model}, parallel)
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
    config, platform = run_config(pattern, parallel, model, mixers), select_platform("cpu")
    config = replace(config, training=replace(config.training, precision=precision))
    groups = make_process_groups(config.parallel, 1)
    trainer = build_trainer(config, model_shape(config, platform, VOCABULARY), groups, platform)
    for step in range(STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    tokenizer = SimpleNamespace(sha256="0" * 64)
    data: Any = SimpleNamespace(
        train_domains=["a"], manifest=SimpleNamespace(tokenizer=tokenizer), vocab_size=VOCABULARY
    )
    CheckpointStore(folder / "checkpoints", identity(config, data), groups, platform).save(trainer.optimizer, PROGRESS)
