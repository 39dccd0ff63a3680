"""Chunks chosen and fetched over shards of a sequence, compared with the whole sequence in one process."""

from __future__ import annotations

import fetching
import pytest
import torch
from pool import WorkerPool

from kernels.top1_chunk import top1_chunk_attention

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])


@WORLDS
def test_blocks_come_by_rank_and_their_gradients_go_back_summed(pool: WorkerPool, world_size: int) -> None:
    """The last rank fetches nothing, and no rank fetches its second block."""
    blocks = torch.arange(world_size * 3 * 2, dtype=torch.float32).view(world_size, 3, 2)
    generator = torch.Generator().manual_seed(2)
    wanted = torch.rand(world_size, world_size, 3, generator=generator) < 0.5
    wanted[-1], wanted[:, -1, 1] = False, False
    for rank, (fetched, gradient) in enumerate(pool.run(fetching.blocks, world_size, blocks, wanted)):
        assert torch.equal(fetched, blocks[wanted[rank]])
        weight = wanted[:, rank].float() * (torch.arange(world_size) + 1.0)[:, None]
        assert torch.equal(gradient, weight.sum(0)[:, None].expand(-1, 2))


@WORLDS
def test_parts_come_from_the_nearest_to_the_first(pool: WorkerPool, world_size: int) -> None:
    parts = torch.randn(world_size, 5, generator=torch.Generator().manual_seed(3))
    for rank, found in enumerate(pool.run(fetching.earlier_parts, world_size, parts)):
        assert [source for source, _ in found] == list(range(rank, -1, -1))
        assert all(torch.equal(part, parts[source]) for source, part in found)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("score", ["approx", "exact", "exact_lse"])
@pytest.mark.parametrize(("per_rank", "top_k"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("ties", [True, False])
def test_chosen_chunks_by_parts_are_those_of_the_whole(
    pool: WorkerPool, world_size: int, score: str, per_rank: int, top_k: int, ties: bool
) -> None:
    size, local = 4, not ties
    length = size * per_rank * world_size
    rule = {"chunk_size": size, "top_k": top_k, "score": score}
    *whole, weights = fetching.inputs(length, ties)
    q, k, v = (x.requires_grad_() for x in whole)
    out, chosen = top1_chunk_attention(q, k, v, **rule, local=local, return_selection=True)
    gradients = torch.autograd.grad(out, [q, k, v], weights)

    parts = pool.run(fetching.chunks_by_parts, world_size, length, ties, local, rule)
    assert torch.equal(torch.cat([part[0] for part in parts], 1), chosen)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 1), out, rtol=1e-12, atol=1e-12)
    for i, expected in enumerate(gradients):
        found = torch.cat([part[2][i] for part in parts], 1)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    # Only chunks that a query of some sample and group chose are fetched.
    for rank, (own, *_, held) in enumerate(parts):
        groups = own.unflatten(2, (2, 2)).permute(0, 2, 1, 3, 4).reshape(4, -1)
        assert held == max(len({c for c in row if 0 <= c < rank * per_rank}) for row in groups.tolist())
