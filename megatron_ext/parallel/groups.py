"""Process groups of a run, created once and passed as arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.parallel.transport import forget_transports


def make_process_groups(parallel: ParallelConfig, seed: int, *, with_gloo: bool = True) -> ProcessGroupCollection:
    """Create the process groups of a parallel layout.

    Megatron's schedules and optimizers look some groups up in its global state, so that is initialised. Our code takes
    them from the returned collection. Rank order, fastest first: tensor, context, data, pipeline.

    Args:
        parallel: sizes of the model-parallel dimensions; the data-parallel size follows from the world size.
        seed: seed of Megatron's generator states (dropout; initial weights do not depend on it).
        with_gloo: True: also create Megatron's gloo groups for communication on the CPU.
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
    """Context manager that provides the groups of a single process, without launcher and port.

    Args:
        communication: backend of torch.distributed.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]  # it exists, but is missing from the type stubs
    dist.init_process_group(communication, store=store, rank=0, world_size=1)
    try:
        yield make_process_groups(ParallelConfig(), seed=1)
    finally:
        destroy_process_groups()
        dist.destroy_process_group()


def destroy_process_groups() -> None:
    """Destroy the groups, so that others can be created in the same processes (e.g. in tests)."""
    forget_transports()
    parallel_state.destroy_model_parallel()
