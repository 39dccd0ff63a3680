"""Exchanges over a group of ranks, compared with plain indexing of the whole tensor, forward and backward."""

from __future__ import annotations

import exchanges
import parity
import pytest
import torch
from pool import WorkerPool

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@WORLDS
@DTYPES
@pytest.mark.parametrize(("heads", "name"), [(4, "heads"), (8, "heads"), (8, "heads in rounds")])
def test_sequence_to_heads(pool: WorkerPool, world_size: int, dtype: torch.dtype, heads: int, name: str) -> None:
    x = exchanges.whole(3 * world_size, heads, dtype)
    for rank, (moved, grad) in enumerate(pool.run(exchanges.move, world_size, name, x)):
        own = heads // world_size
        assert torch.equal(moved, x[:, :, rank * own : (rank + 1) * own])
        assert torch.equal(grad, x[3 * rank : 3 * rank + 3])


@WORLDS
@DTYPES
@pytest.mark.parametrize("name", ["sequence", "sequence in rounds"])
def test_heads_to_sequence(pool: WorkerPool, world_size: int, dtype: torch.dtype, name: str) -> None:
    x = exchanges.whole(3 * world_size, 8, dtype)
    for rank, (moved, grad) in enumerate(pool.run(exchanges.move, world_size, name, x)):
        own = 8 // world_size
        assert torch.equal(moved, x[3 * rank : 3 * rank + 3])
        assert torch.equal(grad, x[:, :, rank * own : (rank + 1) * own])


def test_messages_of_a_round_travel_while_another_is_mixed(pool: WorkerPool) -> None:
    """Messages of all but one of three rounds overlap with work, in each direction and in the backward pass."""
    to_heads = ["send"] * 3
    mixing = ["wait", "mix 0", "send", "wait", "mix 1", "send", "wait", "mix 2", "send"]
    forward = [*to_heads, *mixing, *["wait"] * 3]
    backward = [{"mix 0": "mix 2", "mix 2": "mix 0"}.get(what, what) for what in forward]
    for happened in pool.run(exchanges.order_of_rounds, 2, 3):
        assert happened == [*forward, "backward", *backward]


def test_messages_of_a_sample_travel_while_another_is_projected_or_mixed(pool: WorkerPool) -> None:
    """Each message overlaps with other computation, in each direction and in the backward pass."""
    to_heads = ["in", "send"] * 2
    forward = [*to_heads, *["wait", "mix", "send"] * 2, *["wait", "out"] * 2]
    backward = [{"in": "out", "out": "in"}.get(what, what) for what in forward]
    config = parity.run_config("attention", {}, {}, {"context": 2, "context_exchange_rounds": 2})
    for happened in pool.run(exchanges.order_in_mixer, 2, config):
        assert happened == [*forward, "backward", *backward]


@WORLDS
@DTYPES
@pytest.mark.parametrize("heads", [1, 3])
def test_gather_sequence_sums_the_gradients_of_all_ranks(
    pool: WorkerPool, world_size: int, dtype: torch.dtype, heads: int
) -> None:
    x = exchanges.whole(5 * world_size, heads, dtype)
    for rank, (moved, grad) in enumerate(pool.run(exchanges.move, world_size, "gather", x)):
        assert torch.equal(moved, x)
        factor = sum(range(1, world_size + 1))
        expected = (x[5 * rank : 5 * rank + 5].float() * factor).to(dtype)
        torch.testing.assert_close(grad, expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)


@WORLDS
def test_gradients_of_what_ranks_hold_alike_are_summed_however_they_lie_in_memory(
    pool: WorkerPool, world_size: int
) -> None:
    x = torch.arange(6.0).view(2, 3)
    for gradient in pool.run(exchanges.transposed_gradient, world_size, x):
        assert torch.equal(gradient, x * sum(range(1, world_size + 1)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_zigzag_gives_each_rank_an_early_and_a_late_piece(pool: WorkerPool, world_size: int) -> None:
    x = exchanges.whole(6 * world_size, 2, torch.float32)
    pieces = x.split(3)
    shared_out = [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(world_size)]
    for rank, (moved, grad) in enumerate(pool.run(exchanges.move, world_size, "to_zigzag", x)):
        assert torch.equal(moved, shared_out[rank])
        assert torch.equal(grad, 2 * x[6 * rank : 6 * rank + 6])
    for rank, (moved, grad) in enumerate(pool.run(exchanges.move, world_size, "from_zigzag", torch.cat(shared_out))):
        assert torch.equal(moved, x[6 * rank : 6 * rank + 6])
        assert torch.equal(grad, 2 * shared_out[rank])
