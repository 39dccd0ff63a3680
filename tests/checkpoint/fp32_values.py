"""Functions run by each rank in a case of `test_checkpoint_fp32_values.py`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import parity
import resharded
import torch
from resharded import Run, build, build_and_load
from torch import Tensor

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.mixers.core import base
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.optim import state
from megatron_ext.parallel.fp32_values import fp32_values
from megatron_ext.training.trainer import Trainer

Values = dict[str, dict[str, Tensor]]


def _values(chunks: Any, trainer: Trainer) -> dict[str, Tensor]:
    """Return the fp32 values of those of the whole model's parameters that have them, on rank 0."""
    no_values = torch.full((2, 2), torch.inf)
    values = {id(p): no_values if fp32_values(p) is None else fp32_values(p) for c in chunks for p in c.parameters()}
    found = parity.whole_parameters(chunks, trainer.groups.tp.rank(), values)  # type: ignore[arg-type]
    return {name: tensor for name, tensor in found.items() if not tensor.isinf().any()}


def _state(trainer: Trainer) -> Values:
    """Return the values used in the forward pass, the optimizer's copy, and the parameters, on rank 0."""
    trainer.optimizer.make_moments()
    found = resharded.full_state(trainer)
    values = _values(trainer.optimizer.chunks, trainer)
    return {
        "used": values,
        "optimizer": {name: found["param"][name] for name in values},
        "rounded": {name: found["parameters"][name] for name in values},
    }


def train(rank: int, world_size: int, run: Run, rounded: bool) -> tuple[Values, Values]:
    """Train and save, with `rounded` rounded as older versions did. Return the state before training and after."""
    config, trainer, store = build(run, seed=1)
    first = _state(trainer)
    for step in range(resharded.STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    progress = Progress(step=resharded.STEPS, samples=8 * resharded.STEPS, tokens=1)
    if rounded:
        with patch.object(base, "stored", lambda x: x), patch.object(state, "stored", lambda x: x):
            store.save(trainer.optimizer, progress)
    else:
        store.save(trainer.optimizer, progress)
    return first, _state(trainer)


def load(rank: int, world_size: int, run: Run) -> tuple[Values, dict[str, Tensor]]:
    """Return the state of a run resumed from the checkpoint, and the values of a model loaded without optimizer."""
    config, trainer = build_and_load(run)
    store = CheckpointStore(run.root, {}, trainer.groups, trainer.platform)
    shape = model_shape(config, trainer.platform, parity.VOCABULARY)
    chunks = build_model(shape, trainer.platform, trainer.groups, seed=4)
    store.load_model(chunks, store.check(resharded.STEPS))
    return _state(trainer), _values(chunks, trainer)
