"""Functions run by each rank in `test_checkpoint_resharding.py`: train and save, or load, and return the state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import parity
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.schema import RunConfig
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform.device import select_platform
from megatron_ext.training.build import build_trainer
from megatron_ext.training.trainer import Trainer

STEPS = 2


@dataclass(frozen=True)
class Run:
    """Model under a layout, and the folder of its checkpoints.

    Attributes:
        root: folder of the checkpoints.
        pattern: pattern of the model's layers.
        parallel: fields of `parallel`.
        model: further fields of `model`.
        fields: further arguments of `parity.run_config`. Without a micro-batch size, micro-batches have four samples.
    """

    root: Path
    pattern: str
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def config(self, seed: int) -> RunConfig:
        settings: dict[str, dict[str, Any]] = {"top1_chunk": {"chunk_size": 8}, "mamba2": {"state_size": 16}}
        used = {name: settings[name] for name in self.pattern.split(",") if name in settings}
        fields = {"micro_batch_size": 4, **self.fields}
        config = parity.run_config(self.pattern, used, self.model, self.parallel, **fields)
        return replace(config, training=replace(config.training, seed=seed))


def build(run: Run, seed: int) -> tuple[RunConfig, Trainer, CheckpointStore]:
    """Build the run before its first step, with initial weights of a seed."""
    config, platform = run.config(seed), select_platform("cpu")
    groups = make_process_groups(config.parallel, seed)
    trainer = build_trainer(config, model_shape(config, platform, parity.VOCABULARY), groups, platform)
    return config, trainer, CheckpointStore(run.root, {}, groups, platform)


def build_and_load(run: Run) -> tuple[RunConfig, Trainer]:
    """Build the run with other initial weights, and load its checkpoint."""
    config, trainer, store = build(run, seed=2)
    store.load(trainer.optimizer, store.check(STEPS))
    return config, trainer


def full_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Return parameters and optimizer state of the whole model on rank 0."""
    optimizer, groups = trainer.optimizer, trainer.groups
    with optimizer.gathered_parameters():
        state = {"parameters": parity.whole_parameters(optimizer.chunks, groups.tp.rank())}
    slices = list(optimizer.slices())  # type: ignore[attr-defined]
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        values = {}
        for chunk in optimizer.chunks:
            for parameter in chunk.parameters():
                shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO-3 the parameter itself is empty
                filled = torch.full([shape.numel()], -torch.inf)
                for flat_slice in slices:
                    if flat_slice.parameter is parameter:
                        tensor = flat_slice.tensors[kind]
                        filled[flat_slice.start : flat_slice.start + len(tensor)] = tensor
                dist.all_reduce(filled, dist.ReduceOp.MAX, group=groups.dp_cp)
                assert torch.isfinite(filled).all(), f"some elements have no {kind}"
                values[id(parameter)] = filled.view(shape)
        state[kind] = parity.whole_parameters(optimizer.chunks, groups.tp.rank(), values)
    return state


def save(rank: int, world_size: int, run: Run) -> dict[str, dict[str, Tensor]]:
    """Train briefly, save, and return the whole state."""
    config, trainer, store = build(run, seed=1)
    for step in range(STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    store.save(trainer.optimizer, Progress(step=STEPS, samples=8 * STEPS, tokens=256 * STEPS))
    return full_state(trainer)


def load(rank: int, world_size: int, run: Run) -> tuple[dict[str, dict[str, Tensor]], int]:
    """Load. Return the whole state and the step count of the schedule."""
    _, trainer = build_and_load(run)
    num_steps = trainer.optimizer._scheduler.num_steps  # type: ignore[attr-defined]
    return full_state(trainer), num_steps


def continue_training(rank: int, world_size: int, run: Run) -> list[float]:
    """Load. Return the losses of two steps after the checkpoint. The second depends on the loaded optimizer state."""
    config, trainer = build_and_load(run)
    steps = range(STEPS, STEPS + 2)
    return [trainer.train_step(parity.step_batches(config, trainer.groups, step)).loss for step in steps]
