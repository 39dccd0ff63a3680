"""Functions run by each rank in the tests of fetched chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.top1_chunk import top1_chunk_attention
from megatron_ext.mixers.core.chunk_fetch import choose_over_ranks, fetch_chosen
from megatron_ext.parallel.fetch import fetch_blocks
from megatron_ext.parallel.line import ring_pass


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def blocks(rank: int, world_size: int, blocks_rnx: Tensor, wanted_rrn: Tensor) -> tuple[Tensor, Tensor]:
    """Fetched blocks, and the gradient of this rank's own blocks when rank r weights what it fetched with r + 1."""
    own = blocks_rnx[rank].clone().requires_grad_()
    fetched = fetch_blocks(own, wanted_rrn[rank], _world())
    (gradient,) = torch.autograd.grad(fetched, own, torch.full_like(fetched, rank + 1.0))
    return fetched.detach(), gradient


def earlier_parts(rank: int, world_size: int, x_rw: Tensor) -> list[tuple[int, Tensor]]:
    return [(source, part.clone()) for source, part in ring_pass(x_rw[rank], _world())]


def inputs(length: int, ties: bool) -> list[Tensor]:
    """q with four heads, k and v with two, and weights of the outputs: [2, length, heads, 4], fp64."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(2, length, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    return [x.sign() for x in tensors[:2]] + tensors[2:] if ties else tensors


def chunks_by_parts(
    rank: int, world_size: int, length: int, ties: bool, local: bool, rule: dict[str, Any]
) -> tuple[Tensor, Tensor, list[Tensor], int]:
    """Choice, output and gradients of q, k and v on this rank, and the number of chunks fetched from other ranks."""
    *parts, weights = (x.chunk(world_size, 1)[rank].clone() for x in inputs(length, ties))
    q, k, v = (x.requires_grad_() for x in parts)
    chosen = choose_over_ranks(q, k, group=_world(), **rule)
    some_k, some_v, counted = fetch_chosen(k, v, chosen, chunk_size=rule["chunk_size"], group=_world())
    offset = some_k.shape[1] - q.shape[1]
    out, _ = top1_chunk_attention(q, some_k, some_v, **rule, local=local, query_offset=offset, selection=counted)
    gradients = torch.autograd.grad(out, [q, k, v], weights)
    return chosen, out.detach(), list(gradients), offset // rule["chunk_size"]
