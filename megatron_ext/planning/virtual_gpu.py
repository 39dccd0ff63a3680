"""Platform and process groups of a rank in a simulated world: a GPU without memory, and fake process groups."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.config.schema import ParallelConfig, RunConfig
from megatron_ext.parallel.groups import destroy_process_groups, make_process_groups
from megatron_ext.platform.device import Platform, select_platform


@dataclass(frozen=True)
class VirtualGpu(Platform):
    """Platform that behaves like a GPU but uses the meta device."""

    @property
    def is_cuda(self) -> bool:
        """True, so that code that depends on the device takes the GPU branch."""
        return True


def virtual_gpu() -> VirtualGpu:
    """Return the platform of a simulated rank. The process must see no GPU: Megatron would allocate memory on one."""
    select_platform("cpu")  # replaces the CUDA device that Megatron asks for
    return VirtualGpu(torch.device("meta"), "nccl")


def simulated_config(config: RunConfig) -> RunConfig:
    """Return a configuration whose model runs without GPU-only components.

    Megatron's modules replace Transformer Engine's (see `te_linears`). Messages between pipeline stages are sent one by
    one. Heads are exchanged by NCCL's all-to-all, which the ledger records.
    """
    parallel = replace(config.parallel, batch_p2p_comm=False, context_transport="nccl")
    training, run = replace(config.training, fp8="none"), replace(config.run, backend="local")
    return replace(config, parallel=parallel, training=training, run=run)


@contextmanager
def groups_of_rank(parallel: ParallelConfig, world_size: int, rank: int) -> Iterator[ProcessGroupCollection]:
    """Context manager that yields the process groups of one rank of a simulated world."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield make_process_groups(parallel, seed=1, with_gloo=False)
        finally:
            destroy_process_groups()
            dist.destroy_process_group()
