"""Who takes parts from rank to rank; what they bring is compared on GPUs, in `distributed/test_gpu_transport.py`."""

from __future__ import annotations

import socket
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from megatron_ext.errors import UserError
from megatron_ext.parallel import transport
from megatron_ext.parallel.transport import Collective, forget_transports, transport_of


def _of_a_group(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    first = transport_of(group, "nccl")
    assert isinstance(first, Collective)
    assert first.size == world_size
    assert transport_of(group, "nccl") is first
    forget_transports()
    assert transport_of(group, "nccl") is not first
    forget_transports()


def test_layers_share_the_transport_of_their_group(pool: WorkerPool) -> None:
    pool.run(_of_a_group, 2)


def _on_other_hosts(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    with patch.object(socket, "gethostname", return_value=f"node{rank // 2}"), pytest.raises(UserError) as refused:
        transport_of(group, "copy_engine")
    return str(refused.value)


def test_copy_engines_of_several_hosts_are_refused_on_every_rank(pool: WorkerPool) -> None:
    said = (
        "parallel.context_transport: copy_engine, and ranks of a context-parallel group are on the hosts node0, node1; "
        "choose nccl, or a tensor * context that divides the GPUs of a node"
    )
    assert pool.run(_on_other_hosts, 4) == [said] * 4


def test_gpus_that_share_no_memory_are_refused() -> None:
    memory = "torch.distributed._symmetric_memory"
    with (
        patch(f"{memory}.empty", return_value=None),
        patch(f"{memory}.rendezvous", side_effect=RuntimeError("no peer access\nat CUDASymmetricMemory.cu:1")),
        pytest.raises(UserError) as refused,
    ):
        transport._Outbox(512, MagicMock(), torch.device("cpu"))
    assert str(refused.value) == (
        "parallel.context_transport: copy_engine, and the GPUs share no memory (no peer access); choose nccl"
    )
