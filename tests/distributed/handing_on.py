"""Functions run by each rank in the tests of states passed between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.gated_delta_rule import gated_delta_rule
from megatron_ext.parallel.states import context_parallel_scan, previous_rows


def delta_inputs(length: int) -> list[Tensor]:
    """Random q, k, v, log decay and beta of the gated delta rule, [1, length, 2, ...], float64."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, length, 2, d, generator=generator, dtype=torch.float64) for d in (4, 4, 3))
    g, beta = (torch.rand(1, length, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    return [q, k / k.norm(dim=-1, keepdim=True), v, -0.1 * g, beta]


def delta_rule_by_parts(
    rank: int, world_size: int, length: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor]]:
    """Output of this rank, and gradients of its inputs for the weighted sum of all ranks' outputs.

    Queries, keys and values have the given dtype.
    """
    group = dist.group.WORLD
    assert group is not None
    scalars = torch.promote_types(dtype, torch.float32)
    inputs = [x.to(dtype if x.dim() == 4 else scalars) for x in delta_inputs(length)]
    parts = [x.chunk(world_size, 1)[rank].clone().requires_grad_() for x in inputs]
    q, k, v, g, beta = parts

    def scan(values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, last = gated_delta_rule(q, k, values, g, beta, initial_state=state, output_final_state=True)
        assert last is not None
        return out, last

    out = context_parallel_scan(scan, v, 4, group)
    gradients = torch.autograd.grad(out, parts, weights(length).to(out).chunk(world_size, 1)[rank])
    return out.detach(), list(gradients)


def weights(length: int) -> Tensor:
    """Weights of the outputs in the loss, [1, length, 2, 3]."""
    return torch.randn(1, length, 2, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def rows(rank: int, world_size: int, x_tbuw: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows before this rank's shard, and the gradient of that shard when rank r weights its rows with r + 1."""
    group = dist.group.WORLD
    assert group is not None
    part = x_tbuw.chunk(world_size)[rank].clone().requires_grad_()
    found = previous_rows(part, count, group)
    (gradient,) = torch.autograd.grad(found, part, torch.full_like(found, rank + 1.0))
    return found.detach(), gradient
