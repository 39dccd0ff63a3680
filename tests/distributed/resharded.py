"""Functions run by each rank in `test_checkpoint_resharding.py`: train and save, or load, and return the state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
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


def full_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Return parameters and optimizer state of the whole model on rank 0."""
    optimizer, groups = trainer.optimizer, trainer.groups
    with optimizer.gathered_parameters():
        state = {"parameters": parity.whole_parameters(optimizer.chunks, groups.tp.rank())}
    slices = list(optimizer.slices())  # type: ignore[attr-defined]
    parameters = [parameter for chunk in optimizer.chunks for parameter in chunk.parameters()]
    # Under ZeRO-3 the parameter itself is empty.
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in parameters]
    sizes = [shape.numel() for shape in shapes]
    starts = {id(p): start for p, start in zip(parameters, accumulate(sizes, initial=0), strict=False)}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        filled = torch.full([sum(sizes)], -torch.inf)
        for flat_slice in slices:
            tensor, start = flat_slice.tensors[kind], starts[id(flat_slice.parameter)] + flat_slice.start
            filled[start : start + len(tensor)] = tensor
        dist.all_reduce(filled, dist.ReduceOp.MAX, group=groups.dp_cp)
        assert torch.isfinite(filled).all(), f"some elements have no {kind}"
        values = [part.view(shape) for part, shape in zip(filled.split(sizes), shapes, strict=True)]
        known = {id(parameter): value for parameter, value in zip(parameters, values, strict=True)}
        state[kind] = parity.whole_parameters(optimizer.chunks, groups.tp.rank(), known)
    return state


def save(rank: int, world_size: int, run: Run) -> dict[str, dict[str, Tensor]]:
    """Train briefly, save, and return the whole state."""
    config, trainer, store = build(run, seed=1)
    for step in range(STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    store.save(trainer.optimizer, Progress(step=STEPS, samples=8 * STEPS, tokens=256 * STEPS))
    return full_state(trainer)


def load(rank: int, world_size: int, run: Run) -> dict[str, dict[str, Tensor]]:
    """Load a checkpoint into a model with other initial weights. Return the whole state."""
    _, trainer, store = build(run, seed=2)
    store.load(trainer.optimizer, store.check(STEPS))
    return full_state(trainer)


@dataclass(frozen=True)
class Link:
    """Run of a chain of runs, each of which loads the checkpoint of the one before; results on rank 0.

    Attributes:
        loaded: whole state before the first step; initial weights and zero moments if no checkpoint was loaded.
        loaded_steps: step count of the schedule before the first step.
        losses: losses of the `STEPS` steps before the save.
        saved: whole state at the save.
        later_losses: losses of the `STEPS` steps after the save.
    """

    loaded: dict[str, dict[str, Tensor]]
    loaded_steps: int
    losses: list[float]
    saved: dict[str, dict[str, Tensor]]
    later_losses: list[float]


def continue_chain(rank: int, world_size: int, run: Run, first: int) -> Link:
    """Load the checkpoint of step `first` unless it is 0, train for `STEPS` steps, save, and train `STEPS` more."""
    config, trainer, store = build(run, seed=first + 1)
    if first:
        store.load(trainer.optimizer, store.check(first))
    else:
        trainer.optimizer.make_moments()
    losses, states = [], [full_state(trainer)]
    num_steps = trainer.optimizer._scheduler.num_steps  # type: ignore[attr-defined]
    for step in range(first, first + 2 * STEPS):
        if step == first + STEPS:
            store.save(trainer.optimizer, Progress(step=step, samples=8 * step, tokens=256 * step))
            states.append(full_state(trainer))
        losses.append(trainer.train_step(parity.step_batches(config, trainer.groups, step)).loss)
    return Link(states[0], num_steps, losses[:STEPS], states[1], losses[STEPS:])
