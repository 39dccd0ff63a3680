"""Functions run by each rank in a case of `test_checkpoint_fp32_values.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import parity
import resharded
import torch
from resharded import STEPS, Run, build
from torch import Tensor

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.mixers.core import base
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.optim import state
from megatron_ext.parallel.fp32_values import fp32_values
from megatron_ext.training.trainer import Trainer


def _values(chunks: Any, trainer: Trainer) -> dict[str, Tensor]:
    """Return, on rank 0, the fp32 values of the whole model's parameters, without those that have no such values."""
    no_values = torch.full((2, 2), torch.inf)
    values = {id(p): no_values if fp32_values(p) is None else fp32_values(p) for c in chunks for p in c.parameters()}
    found = parity.whole_parameters(chunks, trainer.groups.tp.rank(), values)  # type: ignore[arg-type]
    return {name: tensor for name, tensor in found.items() if not tensor.isinf().any()}


@dataclass(frozen=True)
class State:
    """Whole state of a run, on rank 0.

    Attributes:
        used: fp32 values that the forward pass uses, by parameter.
        full: see `resharded.full_state`.
    """

    used: dict[str, Tensor]
    full: dict[str, dict[str, Tensor]]


def _state(trainer: Trainer) -> State:
    trainer.optimizer.make_moments()
    return State(_values(trainer.optimizer.chunks, trainer), resharded.full_state(trainer))


def train(
    rank: int, world_size: int, run: Run, first: int, rounded: bool = False
) -> tuple[State, State, dict[str, Tensor]]:
    """Load the checkpoint of step `first` unless it is 0, train for `STEPS` steps and save.

    Args:
        rank: rank of this process.
        world_size: number of processes.
        run: run to continue.
        first: step to continue from; 0: from initial weights.
        rounded: save rounded parameters, as older versions did.

    Returns:
        The state before training, the state after it, and the fp32 values of a model that was loaded from the same
        checkpoint without its optimizer.
    """
    config, trainer, store = build(run, seed=first + 1)
    model_values: dict[str, Tensor] = {}
    if first:
        store.load(trainer.optimizer, store.check(first))
        model_values = _model_values(run, trainer, store, first)
    before = _state(trainer)
    for step in range(first, first + STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    step = first + STEPS
    progress = Progress(step=step, samples=8 * step, tokens=1)
    if rounded:
        with patch.object(base, "stored", lambda x: x), patch.object(state, "stored", lambda x: x):
            store.save(trainer.optimizer, progress)
    else:
        store.save(trainer.optimizer, progress)
    return before, _state(trainer), model_values


def _model_values(run: Run, trainer: Trainer, store: CheckpointStore, step: int) -> dict[str, Tensor]:
    shape = model_shape(run.config(seed=4), trainer.platform, parity.VOCABULARY)
    chunks = build_model(shape, trainer.platform, trainer.groups, seed=4)
    store.load_model(chunks, store.check(step))
    return _values(chunks, trainer)


def load(rank: int, world_size: int, run: Run) -> tuple[State, dict[str, Tensor]]:
    """Return the state of a run resumed from the checkpoint, and the values of a model loaded without optimizer."""
    _, trainer, store = build(run, seed=2)
    store.load(trainer.optimizer, store.check(STEPS))
    return _state(trainer), _model_values(run, trainer, store, STEPS)
