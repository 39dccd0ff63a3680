"""What each rank shows to all later ones, passed on from neighbour to neighbour."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def parts_before(x: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """This rank's part of a sequence, and then those of the ranks before it, the nearest first.

    A part travels along the line of ranks, one step for each that is taken here, while the one before it is used. Two
    parts at a time are held beside this rank's own. No gradient is sent back.

    Args:
        x: this rank's part, of one shape on all ranks.
        group: rank r holds part r. Every rank must take all that comes.

    Yields:
        (rank that holds the part, the part).
    """
    rank, size = group.rank(), group.size()
    visiting = x.detach().contiguous()
    for source in range(rank, -1, -1):
        # The first part has no successor here; the last rank hands nothing on.
        coming = torch.empty_like(visiting) if source > 0 else None
        moves = [] if rank + 1 == size else [dist.P2POp(dist.isend, visiting, group=group, group_peer=rank + 1)]
        if coming is not None:
            moves.append(dist.P2POp(dist.irecv, coming, group=group, group_peer=rank - 1))
        pending = dist.batch_isend_irecv(moves) if moves else []
        yield source, visiting
        for work in pending:
            work.wait()
        if coming is not None:
            visiting = coming
