"""Counts of a model built on the meta device."""

from __future__ import annotations

from functools import cache

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.schema import RunConfig
from megatron_ext.model.build import build_model, training_flops_per_token
from megatron_ext.model.meta_device import on_meta
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.parallel.parameters import count_parameters
from megatron_ext.planning.counts import ModelCounts
from megatron_ext.platform.device import Platform, select_platform


def count(config: RunConfig, vocab_size: int) -> ModelCounts:
    """Count parameters and FLOPs of the whole model in this process, without a GPU.

    Args:
        config: whole configuration with the layout of one process.
        vocab_size: vocabulary size of the tokenizer, before padding.
    """
    platform, groups = _single_process()
    shape = model_shape(config, platform, vocab_size)
    with on_meta():
        chunks = build_model(shape, platform, groups, seed=None)
    flops = training_flops_per_token(shape, chunks, config.data.seq_length)
    return ModelCounts(count_parameters(chunks, tp_size=1).parameters, flops)


@cache
def _single_process() -> tuple[Platform, ProcessGroupCollection]:
    """Return the CPU platform and single-process groups, which are created once per process."""
    platform = select_platform("cpu")
    return platform, groups_of_one_process(platform.communication).__enter__()
