"""Differentiable fetch of blocks from the ranks that hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.exchange import all_to_all


def fetch_blocks(blocks_nx: Tensor, needed_rn: Tensor, group: ProcessGroup) -> Tensor:
    """Fetch the blocks of every rank that this rank needs (all-to-all of uneven sizes).

    Each rank sends the others a mask of the blocks it needs, one byte per block, and receives only those. A block's
    gradient returns to its owner, which sums the gradients of all ranks that fetched it in the order of the ranks.

    Args:
        blocks_nx: this rank's blocks [n, ...], of the same shape on all ranks; requires a gradient on all ranks or on
            none.
        needed_rn: bool [ranks, n], the blocks of each rank that this rank needs.
        group: ranks that take part, all of them, also in the backward pass.

    Returns:
        [fetched blocks, ...], ordered by rank, then by block.
    """
    return _Fetch.apply(blocks_nx, needed_rn, group)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks_nx: Tensor, needed_rn: Tensor, group: ProcessGroup) -> Tensor:
        requested_rn = all_to_all(needed_rn.to(torch.uint8), group)
        # Blocks to send, rank by rank; a block appears once per rank that asked for it.
        sent_m = requested_rn.nonzero()[:, 1]
        ctx.group, ctx.num_blocks, ctx.sent_m = group, len(blocks_nx), sent_m
        ctx.send_counts, ctx.receive_counts = requested_rn.sum(1).tolist(), needed_rn.sum(1).tolist()
        return all_to_all(blocks_nx[sent_m], group, ctx.send_counts, ctx.receive_counts)

    @staticmethod
    def backward(ctx: Any, grad_mx: Tensor) -> tuple[Tensor, None, None]:
        returned_mx = all_to_all(grad_mx, ctx.group, ctx.receive_counts, ctx.send_counts)
        dtype = torch.promote_types(grad_mx.dtype, torch.float32)
        total_nx = grad_mx.new_zeros(ctx.num_blocks, *grad_mx.shape[1:], dtype=dtype)
        # The blocks of one rank are distinct, so that the sum does not depend on an order within a step.
        for indices, gradients in zip(
            ctx.sent_m.split(ctx.send_counts), returned_mx.split(ctx.send_counts), strict=True
        ):
            total_nx[indices] += gradients
        return total_nx.to(grad_mx.dtype), None, None
