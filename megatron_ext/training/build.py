"""From a whole run configuration to the parts that train: the only place that takes it apart for them."""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from pydantic import TypeAdapter

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import RunConfig
from megatron_ext.mixers.registry import load_all
from megatron_ext.model import ModelShape, build_model
from megatron_ext.optim.megatron import MegatronRunOptimizer
from megatron_ext.platform import Platform, choose_backend
from megatron_ext.training.trainer import Trainer


def model_shape(config: RunConfig, platform: Platform, vocab_size: int) -> ModelShape:
    """What the model of a checked and derived configuration is built from."""
    mixers = parse_pattern(config.model.pattern)
    return ModelShape(
        model=config.model,
        mixers=mixers,
        mixer_configs={name: _mixer_config(config, name) for name in set(mixers)},
        parallel=config.parallel,
        vocab_size=vocab_size,
        precision=config.training.precision,
        recompute=config.training.recompute,
        backend=choose_backend(config.run.backend, platform),
    )


def _mixer_config(config: RunConfig, name: str) -> Any:
    return TypeAdapter(load_all()[name].config_type).validate_python(config.mixers.get(name, {}), strict=False)


def build_trainer(config: RunConfig, shape: ModelShape, groups: ProcessGroupCollection, platform: Platform) -> Trainer:
    """Model, optimizer and schedule of this rank, ready for the first step."""
    chunks = build_model(shape, platform, groups, config.training.seed)
    optimizer = MegatronRunOptimizer(
        chunks, config.optimizer, config.training.steps, config.training.precision, groups, platform
    )
    return Trainer(optimizer, groups, platform, config.data.seq_length, config.training.micro_batch_size)
