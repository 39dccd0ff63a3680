"""Memory accounting of meta tensors, compared with hand counts."""

from __future__ import annotations

import torch

from kernels.meta.fused_call import one_kernel
from megatron_ext.planning.ledger import BLOCK, Ledger, Purpose, Watched

HERE, THERE = Purpose("here", 1, "forward"), Purpose("there", None, "backward")


def floats(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.float32)


def test_memory_is_counted_in_blocks_while_there_is_a_tensor() -> None:
    ledger = Ledger()
    with Watched(ledger, lambda: HERE):
        a = floats(1)
        assert a.is_meta
        assert ledger.total == BLOCK
        b = floats(BLOCK // 4 + 1)
        assert ledger.total == 3 * BLOCK
        view = b[1:].view(-1)  # a view has no memory of its own
        assert ledger.total == 3 * BLOCK
        del b
        assert ledger.total == 3 * BLOCK
        del view
        assert ledger.total == BLOCK
        del a
    assert ledger.total == 0
    assert ledger.peak == 3 * BLOCK
    assert ledger.at_peak == {HERE: 3 * BLOCK}


def test_memory_belongs_to_what_asked_for_it() -> None:
    ledger, now = Ledger(), [HERE]
    with Watched(ledger, lambda: now[0]):
        a = floats(BLOCK)
        now[0] = THERE
        b = floats(BLOCK // 4)
        assert ledger.at_peak == {HERE: 4 * BLOCK, THERE: BLOCK}
        del a
        assert ledger.held[HERE] == 0
        assert ledger.held[THERE] == BLOCK
        del b
    assert ledger.peak == 5 * BLOCK


def test_what_is_known_is_left_out() -> None:
    ledger = Ledger()
    weight = torch.empty(1000, device="meta")
    watched = Watched(ledger, lambda: HERE)
    watched.know([weight])
    with watched:
        again = weight.view(10, 100).t()
        assert ledger.total == 0
        doubled = again * 2
        assert ledger.total == 4096  # 4,000 bytes, rounded up to blocks
        del doubled
    assert ledger.peak == 4096


def test_what_comes_between_in_one_kernel_is_no_peak() -> None:
    ledger = Ledger()
    with Watched(ledger, lambda: HERE):
        with one_kernel():
            between = floats(1000 * BLOCK)
            result = between[:BLOCK].clone()
            del between
        assert ledger.peak == 0
        more = result + 1
        assert ledger.peak == 8 * BLOCK
        del result, more
    assert ledger.total == 0


def test_the_backward_pass_of_attention_sums_in_fp32() -> None:
    ledger = Ledger()
    with Watched(ledger, lambda: HERE):
        q, k, v = (torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        size = q.numel() * 2
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        grad = torch.empty_like(out)
        before = ledger.total
        gradients = torch.autograd.grad(out, (q, k, v), grad)
        assert ledger.total == before + 3 * size
        assert ledger.peak == before + 3 * size + 2 * size  # twice as wide as q
        del gradients
