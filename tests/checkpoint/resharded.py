"""What one rank does in a case of `test_checkpoint_resharding.py`: train and save, or load; then show its state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
from torch import Tensor

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform import select_platform
from megatron_ext.training.build import build_trainer, model_shape
from megatron_ext.training.trainer import Trainer

STEPS = 2


def _config(pattern: str, parallel: dict[str, Any], seed: int, model: dict[str, Any]) -> Any:
    settings: dict[str, dict[str, Any]] = {"top1_chunk": {"chunk_size": 8}, "mamba2": {"state_size": 16}}
    used = {name: fields for name, fields in settings.items() if name in pattern.split(",")}
    config = parity.run_config(pattern, used, model, parallel)
    return replace(config, training=replace(config.training, seed=seed))


def parts(
    root: Path, pattern: str, parallel: dict[str, Any], seed: int, model: dict[str, Any]
) -> tuple[Any, Trainer, CheckpointStore]:
    config, platform = _config(pattern, parallel, seed, model), select_platform("cpu")
    groups = make_process_groups(config.parallel, seed)
    trainer = build_trainer(config, model_shape(config, platform, parity.VOCABULARY), groups, platform)
    return config, trainer, CheckpointStore(root, {}, groups, platform)


def whole(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Parameters and Adam's moments of the whole model; on rank 0. The model stays as it is.

    Data- and context-parallel ranks share the moments out; Megatron puts them together. Each is then put in the
    parameter's place, so that one function puts the ranks of a tensor-parallel group together.
    """
    chunks, tp_rank = trainer.optimizer.chunks, trainer.groups.tp.rank()
    found = {"parameters": parity.whole_parameters(chunks, tp_rank)}
    own = [parameter.data.clone() for chunk in chunks for parameter in chunk.parameters()]
    for moment in ("exp_avg", "exp_avg_sq"):
        for part in trainer.optimizer._parts():  # type: ignore[attr-defined]
            with trainer.platform.optimizer_context():
                gathered = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
            for number, buffer in enumerate(part.buffers):
                (tensors,) = gathered[number].values()
                for parameter, (start, end, _) in buffer.param_index_map.items():
                    parameter.data.copy_(tensors[moment][start:end].view_as(parameter))
        found[moment] = parity.whole_parameters(chunks, tp_rank)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(own.pop(0))
    return found


def save(
    rank: int, world_size: int, root: Path, pattern: str, parallel: dict[str, Any], model: dict[str, Any] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Train a little, save, and return the whole state."""
    config, trainer, store = parts(root, pattern, parallel, 1, model or {})
    for step in range(STEPS):
        trainer.train_step(parity.step_batches(config, trainer.groups, step))
    store.save(trainer.optimizer, Progress(step=STEPS, samples=8 * STEPS, tokens=256 * STEPS))
    return whole(trainer)


def load(
    rank: int, world_size: int, root: Path, pattern: str, parallel: dict[str, Any], model: dict[str, Any] | None = None
) -> tuple[dict[str, dict[str, Tensor]], int]:
    """Load into a model of other initial weights; the whole state, and the steps that the schedule counts."""
    _, trainer, store = parts(root, pattern, parallel, 2, model or {})
    store.load(trainer.optimizer, store.check(STEPS))
    counted = trainer.optimizer._scheduler.num_steps  # type: ignore[attr-defined]
    return whole(trainer), counted
