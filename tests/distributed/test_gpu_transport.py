"""GPU tests: transfers by copy engines equal those by NCCL, with any number of messages in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_ext.parallel.transport import forget_transports, transport_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]


def _parts(rank: int, size: int, number: int) -> torch.Tensor:
    """Tensor [ranks, 3, n, 64] whose size, dtype and memory layout vary with the message."""
    dice = torch.Generator("cuda").manual_seed(100 * rank + number)
    width = 1000 * (number % 3 + 1)
    dtype = torch.bfloat16 if number % 2 else torch.float32
    parts_nx = torch.randn(3, width, size, 64, device="cuda", generator=dice).to(dtype).permute(2, 0, 1, 3)
    return parts_nx.contiguous() if number // 2 % 2 else parts_nx


def _send_both_ways(rank: int, size: int, rendezvous: str, under_way: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=size, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    nccl, copies = transport_of(group, "nccl"), transport_of(group, "copy_engine")
    busy = torch.randn(4096, 4096, device="cuda")
    for first in range(0, 60, under_way):
        numbers = range(first, first + under_way)
        sent = [copies.send(_parts(rank, size, number)) for number in numbers]
        if rank == first % size:  # delay one rank
            for _ in range(20):
                busy @ busy
        for number, message in zip(numbers, sent, strict=True):
            message.wait()
            found = message.received_nx.clone()
            expected = nccl.send(_parts(rank, size, number))
            expected.wait()
            assert torch.equal(found, expected.received_nx), f"message {number} on rank {rank}"
    torch.cuda.synchronize()
    forget_transports()
    dist.destroy_process_group()


@pytest.mark.parametrize("under_way", [1, 4])
def test_copy_engines_bring_what_nccl_brings(tmp_path: Path, under_way: int) -> None:
    size = torch.cuda.device_count()
    mp.spawn(_send_both_ways, (size, f"file://{tmp_path / 'meet'}", under_way), nprocs=size)
