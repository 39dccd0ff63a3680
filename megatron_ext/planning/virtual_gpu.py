"""A rank of a world that is not there: a GPU without memory, and process groups that only have sizes."""

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
from megatron_ext.platform import Platform, select_platform


@dataclass(frozen=True)
class VirtualGpu(Platform):
    """Takes the decisions of a GPU, on tensors of the meta device."""

    @property
    def is_cuda(self) -> bool:
        """As on a GPU: what is decided by it is to be planned."""
        return True


def virtual_gpu() -> VirtualGpu:
    """The platform of every rank that is not there, in a process that sees no GPU: Megatron would put tensors on it."""
    select_platform("cpu")  # Megatron asks CUDA for devices; without one it is told of another
    return VirtualGpu(torch.device("meta"), "nccl")


def on_stand_ins(config: RunConfig) -> RunConfig:
    """A configuration whose model needs nothing that a GPU alone has.

    Megatron's own modules stand for Transformer Engine's (see `te_linears`), messages between stages are sent one by
    one, and heads are exchanged by NCCL's call, which is seen.
    """
    parallel = replace(config.parallel, batch_p2p_comm=False, context_transport="nccl")
    training, run = replace(config.training, fp8="none"), replace(config.run, backend="local")
    return replace(config, parallel=parallel, training=training, run=run)


@contextmanager
def groups_of_rank(parallel: ParallelConfig, world_size: int, rank: int) -> Iterator[ProcessGroupCollection]:
    """The process groups of one rank of as many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield make_process_groups(parallel, seed=1, with_gloo=False)
        finally:
            destroy_process_groups()
            dist.destroy_process_group()
