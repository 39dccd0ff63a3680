"""Construction of model, optimizer and trainer from the whole run configuration.

No other module passes sections of the configuration to these components.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.deepspeed import STAGES, deepspeed_config, disk_sections
from megatron_ext.config.layout import layout_of
from megatron_ext.config.schema import RunConfig
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import ModelShape
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.megatron import MegatronRunOptimizer
from megatron_ext.platform.device import Platform
from megatron_ext.training.trainer import Trainer


def build_trainer(
    config: RunConfig, shape: ModelShape, groups: ProcessGroupCollection, platform: Platform, *, initialize: bool = True
) -> Trainer:
    """Build this rank's model, optimizer and schedule, ready for the first step.

    Args:
        config: checked configuration with derived fields.
        shape: shape of the model.
        groups: process groups.
        platform: platform of this process.
        initialize: whether to initialize the weights. False: they will be loaded.
    """
    chunks = build_model(shape, platform, groups, config.training.seed if initialize else None)
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

    check_disk(disk_sections(settings["zero_optimization"]), chunks[0], groups.dp_cp.size())
    return EngineRunOptimizer(chunks, optimizer, training.steps, groups, platform, settings)
