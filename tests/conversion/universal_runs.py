"""Functions run by each rank in the tests of universal checkpoints: train and save, load with DeepSpeed, or resume."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import deepspeed
import parity
import resharded
import saved_runs
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.optim.deepspeed_groups import GroupsForDeepSpeed, join_process_group
from megatron_ext.optim.parameter_groups import parameter_groups
from megatron_ext.optim.registry import algorithm_of
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform.device import select_platform

State = dict[str, dict[str, Tensor]]


def config_of(pattern: str, parallel: dict[str, Any], model: dict[str, Any], sharding: str, precision: str) -> Any:
    config = saved_runs.run_config(pattern, parallel, model, {})
    training = replace(config.training, precision=cast(Any, precision))
    return replace(config, training=training, optimizer=replace(config.optimizer, sharding=cast(Any, sharding)))


def save(rank: int, world_size: int, folder: Path, *case: Any) -> tuple[State, list[float]]:
    """Train briefly and save. Return the state of the whole run, and the losses of the following steps."""
    config = config_of(*case)
    trainer = saved_runs.train_and_save(folder, config)
    return resharded.full_state(trainer), _later_losses(trainer, config)


def resume(rank: int, world_size: int, folder: Path, *case: Any) -> tuple[State, list[float]]:
    """Resume. Return the loaded state of the whole run, and the losses of the following steps."""
    config = config_of(*case)
    trainer, store = saved_runs.trainer_and_store(folder, config)
    record, damages = store.check_newest()
    assert not damages
    assert record.progress == saved_runs.PROGRESS
    store.load(trainer.optimizer, record)
    return resharded.full_state(trainer), _later_losses(trainer, config)


def _later_losses(trainer: Any, config: Any) -> list[float]:
    steps = range(saved_runs.STEPS, saved_runs.STEPS + 2)
    return [trainer.train_step(parity.step_batches(config, trainer.groups, step)).loss for step in steps]


def load_by_deepspeed(
    rank: int, world_size: int, folder: Path, stage: int, pattern: str, parallel: dict[str, Any], model: dict[str, Any]
) -> tuple[State, set[float], int]:
    """Load a checkpoint into an engine. Return its whole state, and the step counts of Adam and of the engine."""
    engine, chunk, groups = _engine(stage, pattern, parallel, model)
    loaded, _ = engine.load_checkpoint(str(folder))
    assert loaded is not None
    state = _full_state(chunk, groups, stage)
    steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values()}
    return state, steps, engine.global_steps


def save_by_deepspeed(
    rank: int, world_size: int, ours: Path, theirs: Path, stage: int, pattern: str, model: dict[str, Any]
) -> dict[str, Tensor]:
    """Load into an engine, and let DeepSpeed save and convert. Return the parameters by name on rank 0."""
    engine, chunk, _ = _engine(stage, pattern, {}, model)
    engine.load_checkpoint(str(ours))
    chunk.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
    chunk._register_state_dict_hook(_without_extra_state)
    engine.save_checkpoint(str(theirs), tag="plain")
    if rank == 0:
        folders = {"input_folder": str(theirs / "plain"), "output_folder": str(theirs / "universal")}
        workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        ds_to_universal.main(Namespace(**folders, **workers, strict=True, inject_missing_state=False))
    return {name: safe_get_full_fp32_param(p).clone() for name, p in chunk.named_parameters()}


def _without_extra_state(_: Any, state: dict[str, Any], *__: Any) -> None:
    """Remove Megatron's entries that are None, on which DeepSpeed's converter fails."""
    for key in [key for key in state if key.endswith("_extra_state")]:
        del state[key]


def _engine(stage: int, pattern: str, parallel: dict[str, Any], model: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Build an engine around a model with other weights. Return engine, model and process groups."""
    platform, config = select_platform("cpu"), config_of(pattern, parallel, model, "none", "fp32")
    groups = make_process_groups(config.parallel, 1)
    (chunk,) = build_model(model_shape(config, platform, saved_runs.VOCABULARY), platform, groups, seed=99)
    join_process_group(platform.communication)  # avoids an operator that DeepSpeed would compile for a minute
    engine, *_ = deepspeed.initialize(
        model=chunk,
        optimizer=algorithm_of(config.optimizer).build(parameter_groups([chunk]), config.optimizer),
        mpu=GroupsForDeepSpeed(groups),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "checkpoint": {"load_universal": True},
        },
        dist_init_required=False,
    )
    return engine, chunk, groups


def _full_state(chunk: Any, groups: Any, stage: int) -> State:
    parameters = list(chunk.parameters())
    state: State = {}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        get: Any = safe_get_full_fp32_param if kind == "param" else safe_get_full_optimizer_state
        more = () if kind == "param" else (kind,)
        values = {id(parameter): get(parameter, *more) for parameter in parameters}
        state[kind] = parity.whole_parameters([chunk], groups.tp.rank(), values)
    with GatheredParameters(parameters) if stage == 3 else torch.no_grad():
        state["parameters"] = parity.whole_parameters([chunk], groups.tp.rank())
    return state
