"""What one rank does in a case of `test_checkpoint_resharding.py`: train and save, or load; then show its state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform import select_platform
from megatron_ext.training.build import build_trainer, model_shape
from megatron_ext.training.trainer import Trainer

STEPS = 2


def _config(pattern: str, parallel: dict[str, Any], seed: int, model: dict[str, Any], fields: dict[str, Any]) -> Any:
    settings: dict[str, dict[str, Any]] = {"top1_chunk": {"chunk_size": 8}, "mamba2": {"state_size": 16}}
    used = {name: fields for name, fields in settings.items() if name in pattern.split(",")}
    config = parity.run_config(pattern, used, model, parallel, **fields)
    return replace(config, training=replace(config.training, seed=seed))


def parts(
    root: Path,
    pattern: str,
    parallel: dict[str, Any],
    seed: int,
    model: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
) -> tuple[Any, Trainer, CheckpointStore]:
    config, platform = _config(pattern, parallel, seed, model or {}, fields or {}), select_platform("cpu")
    parity.count_anew()
    groups = make_process_groups(config.parallel, seed)
    trainer = build_trainer(config, model_shape(config, platform, parity.VOCABULARY), groups, platform)
    return config, trainer, CheckpointStore(root, {}, groups, platform)


def whole(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Parameters and the optimizer's state of the whole model; on rank 0."""
    optimizer, groups = trainer.optimizer, trainer.groups
    with optimizer.whole():
        found = {"parameters": parity.whole_parameters(optimizer.chunks, groups.tp.rank())}
    held = list(optimizer.stretches())  # type: ignore[attr-defined]
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        values = {}
        for chunk in optimizer.chunks:
            for parameter in chunk.parameters():
                shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves nothing in the parameter
                filled = torch.full([shape.numel()], -torch.inf)
                for stretch in held:
                    if stretch.parameter is parameter:
                        tensor = stretch.tensors[kind]
                        filled[stretch.start : stretch.start + len(tensor)] = tensor
                dist.all_reduce(filled, dist.ReduceOp.MAX, group=groups.dp_cp)
                assert torch.isfinite(filled).all(), f"nobody holds {kind} of all elements"
                values[id(parameter)] = filled.view(shape)
        found[kind] = parity.whole_parameters(optimizer.chunks, groups.tp.rank(), values)
    return found


def save(
    rank: int,
    world_size: int,
    root: Path,
    pattern: str,
    parallel: dict[str, Any],
    model: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Train a little, save, and return the whole state."""
    config, trainer, store = parts(root, pattern, parallel, 1, model, fields)
    for step in range(STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    store.save(trainer.optimizer, Progress(step=STEPS, samples=8 * STEPS, tokens=256 * STEPS))
    return whole(trainer)


def load(
    rank: int,
    world_size: int,
    root: Path,
    pattern: str,
    parallel: dict[str, Any],
    model: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
) -> tuple[dict[str, dict[str, Tensor]], int]:
    """Load into a model of other initial weights; the whole state, and the steps that the schedule counts."""
    _, trainer, store = parts(root, pattern, parallel, 2, model, fields)
    store.load(trainer.optimizer, store.check(STEPS))
    counted = trainer.optimizer._scheduler.num_steps  # type: ignore[attr-defined]
    return whole(trainer), counted


def go_on(
    rank: int, world_size: int, root: Path, pattern: str, parallel: dict[str, Any], fields: dict[str, Any]
) -> list[float]:
    """Losses of the steps after the checkpoint, of a model that was loaded from it."""
    config, trainer, store = parts(root, pattern, parallel, 2, {}, fields)
    store.load(trainer.optimizer, store.check(STEPS))
    steps = range(STEPS, STEPS + 3)
    return [trainer.train_step(parity.step_batches(config, trainer.groups, step)).loss for step in steps]
