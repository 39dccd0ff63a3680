"""States and rows passed between shards of a sequence, compared with the whole sequence in one process."""

from __future__ import annotations

import handing_on
import pytest
import torch
from pool import WorkerFailed, WorkerPool

from kernels.gated_delta_rule import gated_delta_rule

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])


@WORLDS
@pytest.mark.parametrize("length", [4, 40])
def test_the_delta_rule_by_parts_is_that_of_the_whole(pool: WorkerPool, world_size: int, length: int) -> None:
    inputs = [x.requires_grad_() for x in handing_on.delta_inputs(length)]
    out, _ = gated_delta_rule(*inputs)
    gradients = torch.autograd.grad(out, inputs, handing_on.weights(length))
    parts = pool.run(handing_on.delta_rule_by_parts, world_size, length)
    torch.testing.assert_close(torch.cat([part for part, _ in parts], 1), out, rtol=1e-12, atol=1e-12)
    for i, whole in enumerate(gradients):
        found = torch.cat([own[i] for _, own in parts], 1)
        torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-12)


def test_in_16_bits_parts_are_little_further_off_than_a_rounded_output(pool: WorkerPool) -> None:
    """Rounding applies to the state, to what tokens read from it, and once to the sum of both parts of the output."""
    inputs = [x.bfloat16().double() for x in handing_on.delta_inputs(400)[:3]] + handing_on.delta_inputs(400)[3:]
    exact, _ = gated_delta_rule(*inputs)
    parts = pool.run(handing_on.delta_rule_by_parts, 2, 400, torch.bfloat16)
    found = torch.cat([part for part, _ in parts], 1)
    rounded = (exact.bfloat16() - exact).norm()
    assert (found - exact).norm() < 1.6 * rounded


@WORLDS
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_before_are_the_end_of_the_part_before(pool: WorkerPool, world_size: int, count: int) -> None:
    x = torch.arange(3 * world_size * 2, dtype=torch.float32).view(-1, 1, 2, 1) + 1
    for rank, (found, gradient) in enumerate(pool.run(handing_on.rows, world_size, x, count)):
        begin = 3 * rank
        assert torch.equal(found, x[begin - count : begin] if rank else torch.zeros_like(found))
        expected = torch.zeros_like(gradient)
        expected[3 - count :] = rank + 2 if rank + 1 < world_size else 0
        assert torch.equal(gradient, expected)


def test_parts_shorter_than_what_is_asked_of_them(pool: WorkerPool) -> None:
    with pytest.raises(
        WorkerFailed, match=r"has 3 positions, but the convolution needs 4 previous positions; reduce parallel\.context"
    ):
        pool.run(handing_on.rows, 2, torch.zeros(6, 1, 1, 1), 4)
