"""Global batch sizes near the configured one that are divisible among the replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.config.layout import model_parallel_size
from megatron_ext.config.schema import RunConfig

if TYPE_CHECKING:
    from megatron_ext.planning.plan import Machine


def divisible_batch(config: RunConfig, world_size: int) -> RunConfig:
    """Replace the global batch size by the nearest that all replicas can divide into whole micro-batches.

    Args:
        config: configuration of the run.
        world_size: number of ranks.

    Returns:
        Configuration with the new batch size. It is unchanged if its batch is already divisible, or if the ranks do not
        form whole replicas.
    """
    replicas, remainder = divmod(world_size, model_parallel_size(config.parallel))
    if remainder or not replicas:
        return config
    rounds = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    return _nearest_batch(config, config.training.micro_batch_size * replicas * rounds)


def batch_for_replica_per_node(config: RunConfig, machine: Machine) -> RunConfig:
    """Replace the global batch size by the nearest that is divisible among one replica per node."""
    return _nearest_batch(config, config.training.micro_batch_size * machine.nodes)


def _nearest_batch(config: RunConfig, multiple: int) -> RunConfig:
    configured = config.training.global_batch_size
    if configured % multiple == 0:
        return config
    batch = max(1, (configured + multiple // 2) // multiple) * multiple
    return replace(config, training=replace(config.training, global_batch_size=batch))
