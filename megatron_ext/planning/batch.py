"""Global batch sizes near the configured one that are divisible among the replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.config.layout import model_parallel_size
from megatron_ext.config.schema import RunConfig

if TYPE_CHECKING:
    from megatron_ext.planning.plan import Machine


def fitting_batch(config: RunConfig, world_size: int) -> RunConfig:
    """Replace the global batch size by the nearest that all replicas can divide into whole micro-batches.

    Args:
        config: configuration of the run.
        world_size: number of ranks.

    Returns:
        Configuration with the new batch size. It is unchanged if its batch is already divisible, or if the ranks do not
        form whole replicas.
    """
    replicas, left = divmod(world_size, model_parallel_size(config.parallel))
    if left or not replicas:
        return config
    rounds = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    return _nearest(config, config.training.micro_batch_size * replicas * rounds)


def batch_of_a_replica_a_node(config: RunConfig, machine: Machine) -> RunConfig:
    """Replace the global batch size by the nearest that is divisible among one replica per node."""
    return _nearest(config, config.training.micro_batch_size * machine.nodes)


def _nearest(config: RunConfig, samples: int) -> RunConfig:
    asked = config.training.global_batch_size
    if asked % samples == 0:
        return config
    batch = max(1, (asked + samples // 2) // samples) * samples
    return replace(config, training=replace(config.training, global_batch_size=batch))
