"""Sizes that follow from the configuration and the number of processes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.schema import ParallelConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a run over its processes.

    Attributes:
        world_size: processes.
        data_parallel_size: replicas of the model.
        num_micro_batches: forward passes of a data-parallel rank per optimizer step.
    """

    world_size: int
    data_parallel_size: int
    num_micro_batches: int


def model_parallel_size(parallel: ParallelConfig) -> int:
    """Return the number of processes of one model replica (TP * PP * CP)."""
    return parallel.tensor * parallel.pipeline * parallel.context


def sequence_parallel(config: RunConfig) -> bool:
    """Resolve `parallel.sequence`. `auto` is on with TP > 1 if seq_length is a multiple of TP * CP."""
    p = config.parallel
    if p.sequence == "auto":
        return p.tensor > 1 and config.data.seq_length % (p.tensor * p.context) == 0
    return p.sequence


def layout_of(config: RunConfig, world_size: int) -> Layout:
    """Compute the layout of a configuration that `rules.check` accepts for this world size.

    Args:
        config: the configuration.
        world_size: processes.

    Returns:
        The layout. Sizes that do not divide evenly are rounded down. `rules.check` refuses such a configuration.
    """
    data_parallel_size = world_size // model_parallel_size(config.parallel)
    samples = config.training.micro_batch_size * max(1, data_parallel_size)
    return Layout(
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        num_micro_batches=config.training.global_batch_size // samples,
    )
