"""Memory accounting of meta tensors, compared with hand counts."""

from __future__ import annotations

import torch

from kernels.meta.fused_call import one_kernel
from megatron_ext.planning.ledger import BLOCK_SIZE, Ledger, LedgerMode, Purpose

HERE, THERE = Purpose("here", 1, "forward"), Purpose("there", None, "backward")


def floats(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.float32)


def test_memory_is_counted_in_blocks_until_release() -> None:
    ledger = Ledger()
    with LedgerMode(ledger, lambda: HERE):
        a = floats(1)
        assert a.is_meta
        assert ledger.total == BLOCK_SIZE
        b = floats(BLOCK_SIZE // 4 + 1)
        assert ledger.total == 3 * BLOCK_SIZE
        view = b[1:].view(-1)  # a view has no memory of its own
        assert ledger.total == 3 * BLOCK_SIZE
        del b
        assert ledger.total == 3 * BLOCK_SIZE
        del view
        assert ledger.total == BLOCK_SIZE
        del a
    assert ledger.total == 0
    assert ledger.peak == 3 * BLOCK_SIZE
    assert ledger.at_peak == {HERE: 3 * BLOCK_SIZE}


def test_memory_is_recorded_by_purpose() -> None:
    ledger, now = Ledger(), [HERE]
    with LedgerMode(ledger, lambda: now[0]):
        a = floats(BLOCK_SIZE)
        now[0] = THERE
        b = floats(BLOCK_SIZE // 4)
        assert ledger.at_peak == {HERE: 4 * BLOCK_SIZE, THERE: BLOCK_SIZE}
        del a
        assert ledger.allocated[HERE] == 0
        assert ledger.allocated[THERE] == BLOCK_SIZE
        del b
    assert ledger.peak == 5 * BLOCK_SIZE


def test_excluded_tensors_are_not_counted() -> None:
    ledger = Ledger()
    weight = torch.empty(1000, device="meta")
    mode = LedgerMode(ledger, lambda: HERE)
    mode.exclude([weight])
    with mode:
        again = weight.view(10, 100).t()
        assert ledger.total == 0
        doubled = again * 2
        assert ledger.total == 4096  # 4,000 bytes, rounded up to blocks
        del doubled
    assert ledger.peak == 4096


def test_temporaries_of_fused_kernel_do_not_count() -> None:
    ledger = Ledger()
    with LedgerMode(ledger, lambda: HERE):
        with one_kernel():
            between = floats(1000 * BLOCK_SIZE)
            result = between[:BLOCK_SIZE].clone()
            del between
        assert ledger.peak == 0
        more = result + 1
        assert ledger.peak == 8 * BLOCK_SIZE
        del result, more
    assert ledger.total == 0


def test_the_backward_pass_of_attention_sums_in_fp32() -> None:
    ledger = Ledger()
    with LedgerMode(ledger, lambda: HERE):
        q, k, v = (torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        size = q.numel() * 2
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        grad = torch.empty_like(out)
        before = ledger.total
        gradients = torch.autograd.grad(out, (q, k, v), grad)
        assert ledger.total == before + 3 * size
        assert ledger.peak == before + 3 * size + 2 * size  # twice as wide as q
        del gradients
