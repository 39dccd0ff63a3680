"""Construction of model, optimizer and trainer from the whole run configuration.

No other module passes sections of the configuration to these components.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from pydantic import TypeAdapter

from megatron_ext.config.deepspeed import STAGES, deepspeed_config, on_disk
from megatron_ext.config.layout import layout_of, sequence_parallel
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import UserError
from megatron_ext.mixers.registry import load_all
from megatron_ext.model import ModelShape, build_model
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.megatron import MegatronRunOptimizer
from megatron_ext.platform import Platform, choose_backend
from megatron_ext.training.trainer import Trainer


def model_shape(config: RunConfig, platform: Platform, vocab_size: int) -> ModelShape:
    """Return the description from which the model is built, for a checked configuration with derived fields."""
    mixers = parse_pattern(config.model.pattern)
    backend, fp8 = choose_backend(config.run.backend, platform), config.training.fp8
    if fp8 != "none" and backend == "local":
        reason = "is not installed" if platform.is_cuda else "needs a GPU"
        mend = "install the extra `selectron[gpu]` on a GPU machine, or set training.fp8=none"
        raise UserError("training.fp8", f"'{fp8}' is computed by Transformer Engine, which {reason}", mend)
    parallel = config.parallel
    if parallel.context_transport == "copy_engine" and parallel.context > 1 and not platform.is_cuda:
        mend = "train on GPUs, or set parallel.context_transport=nccl, which is gloo here"
        raise UserError("parallel.context_transport", "copy_engine, and there is no GPU", mend)
    return ModelShape(
        model=config.model,
        mixers=mixers,
        mixer_configs={name: _mixer_config(config, name) for name in set(mixers)},
        parallel=replace(parallel, sequence=sequence_parallel(config)),
        vocab_size=vocab_size,
        precision=config.training.precision,
        recompute=config.training.recompute,
        backend=backend,
        fp8=fp8,
    )


def _mixer_config(config: RunConfig, name: str) -> Any:
    return TypeAdapter(load_all()[name].config_type).validate_python(config.mixers.get(name, {}), strict=False)


def build_trainer(
    config: RunConfig, shape: ModelShape, groups: ProcessGroupCollection, platform: Platform, *, begins: bool = True
) -> Trainer:
    """Build this rank's model, optimizer and schedule, ready for the first step.

    Args:
        config: checked configuration with derived fields.
        shape: of the model.
        groups: process groups.
        platform: of this process.
        begins: initialize the weights. False: they will be loaded.
    """
    chunks = build_model(shape, platform, groups, config.training.seed if begins else None)
    optimizer = _optimizer(config, chunks, groups, platform)
    data, size = config.data, config.training.micro_batch_size
    return Trainer(optimizer, groups, platform, data.seq_length, size, reset_attention=data.reset_attention)


def _optimizer(
    config: RunConfig, chunks: list[Any], groups: ProcessGroupCollection, platform: Platform
) -> RunOptimizer:
    optimizer, training = config.optimizer, config.training
    if optimizer.sharding not in STAGES:
        return MegatronRunOptimizer(chunks, optimizer, training.steps, training.precision, groups, platform)
    settings = deepspeed_config(optimizer, training, layout_of(config, dist.get_world_size()).num_micro_batches)
    # Imported here: DeepSpeed takes seconds to import, and not every run needs it.
    if optimizer.sharding == "zero1":
        from megatron_ext.optim.zero1 import Zero1RunOptimizer

        return Zero1RunOptimizer(chunks, optimizer, training.steps, groups, platform, settings)
    from megatron_ext.optim.disk import check_disk
    from megatron_ext.optim.zero23 import EngineRunOptimizer

    check_disk(on_disk(settings["zero_optimization"]), chunks[0], groups.dp_cp.size())
    return EngineRunOptimizer(chunks, optimizer, training.steps, groups, platform, settings)
