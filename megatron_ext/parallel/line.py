"""Point-to-point transfer of each rank's shard to all later ranks, from neighbour to neighbour."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def ring_pass(x: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Iterate over this rank's shard of a sequence and then those of the ranks before it, the nearest first.

    The next shard is received while the current one is in use, so at most two shards are held besides this rank's own.
    Not differentiable.

    Args:
        x: this rank's shard, of the same shape on all ranks.
        group: rank r holds shard r. Every rank must exhaust the iterator.

    Yields:
        (rank that holds the shard, the shard).
    """
    rank, size = group.rank(), group.size()
    shard = x.detach().contiguous()
    for source in range(rank, -1, -1):
        # No shard precedes rank 0's; the last rank sends nothing.
        next_shard = torch.empty_like(shard) if source > 0 else None
        operations = [] if rank + 1 == size else [dist.P2POp(dist.isend, shard, group=group, group_peer=rank + 1)]
        if next_shard is not None:
            operations.append(dist.P2POp(dist.irecv, next_shard, group=group, group_peer=rank - 1))
        pending = dist.batch_isend_irecv(operations) if operations else []
        yield source, shard
        for work in pending:
            work.wait()
        if next_shard is not None:
            shard = next_shard
