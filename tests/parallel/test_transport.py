"""Transports between ranks: selection and errors. `distributed/test_gpu_transport.py` compares results on GPUs."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from torch.distributed import ProcessGroup

from megatron_ext.parallel import transport
from megatron_ext.parallel.transport import Collective, forget_transports, transport_of
from megatron_ext.utils.errors import UserError


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


def test_transport_is_shared_per_group(pool: WorkerPool) -> None:
    pool.run(_of_a_group, 2)


def _on_other_hosts(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    with patch.object(socket, "gethostname", return_value=f"node{rank // 2}"), pytest.raises(UserError) as refused:
        transport_of(group, "copy_engine")
    return str(refused.value)


def test_copy_engines_across_hosts_are_rejected(pool: WorkerPool) -> None:
    said = (
        "parallel.context_transport: copy_engine, but the ranks of a context-parallel group are on "
        "node0, node1; "
        "choose nccl, or a tensor * context that divides the GPUs of a node"
    )
    assert pool.run(_on_other_hosts, 4) == [said] * 4


def test_gpus_without_shared_memory_are_rejected() -> None:
    memory = "torch.distributed._symmetric_memory"
    with (
        patch(f"{memory}.empty", return_value=None),
        patch(f"{memory}.rendezvous", side_effect=RuntimeError("no peer access\nat CUDASymmetricMemory.cu:1")),
        pytest.raises(UserError) as refused,
    ):
        transport._Outbox(512, MagicMock(), torch.device("cpu"))
    assert str(refused.value) == (
        "parallel.context_transport: copy_engine, but the GPUs cannot share memory (no peer access); choose nccl"
    )


class _FileOutbox:
    """Fake of `_Outbox`: the memory of a rank is a file that other ranks map."""

    folder = Path()

    def __init__(self, num_bytes: int, group: ProcessGroup, device: torch.device) -> None:
        self.num_bytes, self._group = num_bytes, group
        self._number = len(list(self.folder.glob(f"{group.rank()}-*")))
        (self.folder / f"{group.rank()}-{self._number}").write_bytes(bytes(num_bytes))
        dist.barrier(group)

    def views(self, rank: int, template: torch.Tensor) -> torch.Tensor:
        path = self.folder / f"{rank}-{self._number}"
        flat = torch.from_file(str(path), shared=True, size=template.numel(), dtype=template.dtype)
        return flat.view(template.shape)

    def synchronize(self) -> None:
        dist.barrier(self._group)


def _exchange_by_copy_engines(rank: int, world_size: int, folder: Path) -> int:
    group = dist.group.WORLD
    assert group is not None
    fakes = {name: MagicMock() for name in ("Stream", "Event", "current_stream", "current_device")}
    fakes["current_device"].return_value = 0
    with (
        patch.multiple(torch.cuda, **fakes, stream=lambda _: nullcontext()),
        patch.object(_FileOutbox, "folder", folder),
        patch.object(transport, "_Outbox", _FileOutbox),
    ):
        engines = transport.CopyEngines(group)
        for number, width in enumerate((5, 3, 5, 7)):
            sent = []
            for other in (0, 1):  # two messages in flight
                parts = torch.arange(2.0 * width * world_size).view(2, width, world_size).permute(2, 0, 1)
                sent.append(engines.send(parts + 1000 * rank + 100 * number + 10000 * other))
            for other, message in enumerate(sent):
                message.wait()
                own = parts[rank] + 100 * number + 10000 * other
                expected = torch.stack([own + 1000 * sender for sender in range(world_size)])
                assert torch.equal(message.received_nx, expected)
    return len(list(folder.glob(f"{rank}-*")))


def test_copy_engine_messages_and_outbox_reuse(pool: WorkerPool, tmp_path: Path) -> None:
    """With two messages in flight, the first two outboxes serve all sizes but the last, which is larger."""
    assert pool.run(_exchange_by_copy_engines, 4, tmp_path) == [4] * 4
