"""Candidate layouts of a configuration on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from megatron_ext.config.layout import model_parallel_size, sequence_parallel
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import RunConfig

RECOMPUTE: tuple[Literal["none", "mlp", "full"], ...] = ("none", "mlp", "full")
"""Recomputation modes, from the fastest to the one with least memory."""


def candidate_layouts(config: RunConfig, world_size: int, per_node: int) -> Iterator[Sequence[RunConfig]]:
    """Yield sequences of configurations that differ only in layout, micro-batch size and recomputation.

    Some configurations break a rule. Sizes are powers of two. Tensor and context parallelism stay within a node. Tensor
    parallelism is always combined with sequence parallelism, because tensor parallelism alone needs more memory for no
    gain. The micro-batch size is 1 or as configured. The configurations of one sequence differ only in recomputation,
    the fastest first, so the first that fits is the best.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        per_node: number of ranks per node.
    """
    num_layers = len(parse_pattern(config.model.pattern))
    for tensor in _powers_of_two(min(per_node, config.model.num_attention_heads)):
        for context in _powers_of_two(per_node // tensor):
            for pipeline in _powers_of_two(min(num_layers, world_size // (tensor * context))):
                parallel = replace(
                    config.parallel,
                    tensor=tensor,
                    sequence=tensor > 1,
                    context=context,
                    pipeline=pipeline,
                    virtual_pipeline=1,
                )
                replicas, remainder = divmod(world_size, model_parallel_size(parallel))
                if remainder or not replicas:
                    continue
                for micro_batch_size in sorted({1, config.training.micro_batch_size}):
                    yield [
                        replace(
                            config,
                            parallel=parallel,
                            training=replace(config.training, micro_batch_size=micro_batch_size, recompute=recompute),
                        )
                        for recompute in RECOMPUTE
                    ]


def use_copy_engines(config: RunConfig, rounds: int) -> RunConfig:
    """Return the configuration with copy engines as transport of the head exchange, in `rounds` rounds."""
    parallel = replace(config.parallel, context_transport="copy_engine", context_exchange_rounds=rounds)
    return replace(config, parallel=parallel)


def _powers_of_two(limit: int) -> Iterator[int]:
    """Yield the powers of two up to `limit`."""
    power = 1
    while power <= limit:
        yield power
        power *= 2


def layout_overrides(config: RunConfig) -> str:
    """Return the layout of a candidate as command-line overrides."""
    parallel, training = config.parallel, config.training
    exchange = (
        f"parallel.context_transport={parallel.context_transport} "
        f"parallel.context_exchange_rounds={parallel.context_exchange_rounds} "
    )
    return (
        f"parallel.tensor={parallel.tensor} parallel.sequence={str(sequence_parallel(config)).lower()} "
        f"parallel.context={parallel.context} {exchange if parallel.context > 1 else ''}"
        f"parallel.pipeline={parallel.pipeline} "
        f"training.micro_batch_size={training.micro_batch_size} training.recompute={training.recompute}"
    )
