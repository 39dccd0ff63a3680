"""Process groups of a run, made once and passed on as arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.parallel.transport import forget_transports


def make_process_groups(parallel: ParallelConfig, seed: int, *, with_gloo: bool = True) -> ProcessGroupCollection:
    """Arrange the world's processes as the configuration says.

    Megatron's schedules and optimizers still look some groups up in its global state, so they are made there; ours
    take them from the collection that is returned. Rank order, fastest first: tensor, context, data, pipeline.

    Args:
        parallel: sizes of the model-parallel dimensions; the data-parallel size is what is left.
        seed: of Megatron's generator states (dropout; initial weights do not depend on it).
        with_gloo: also make the groups that Megatron has for what it exchanges through the CPU.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        create_gloo_process_groups=with_gloo,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


@contextmanager
def groups_of_one_process(communication: str) -> Iterator[ProcessGroupCollection]:
    """The groups of this process alone, with no launcher and no port.

    Args:
        communication: torch.distributed's backend.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]  # it is there, and not in its list of names
    dist.init_process_group(communication, store=store, rank=0, world_size=1)
    try:
        yield make_process_groups(ParallelConfig(), seed=1)
    finally:
        destroy_process_groups()
        dist.destroy_process_group()


def destroy_process_groups() -> None:
    """Forget the groups, so that others can be made in the same processes (tests do)."""
    forget_transports()
    parallel_state.destroy_model_parallel()
