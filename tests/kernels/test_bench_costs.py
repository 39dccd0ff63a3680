"""Formulas for operations and bytes, compared with counts over every query and key."""

import pytest

from kernels.bench import costs
from kernels.bench.cases import Shape

LENGTHS = (1, 5, 16, 37, 64, 70)


def shape(length: int, groups: int = 4) -> Shape:
    return Shape(batch=3, length=length, heads=4, groups=groups, head_dim=8)


def count(length: int, visible) -> int:
    return sum(visible(t, s) for t in range(length) for s in range(t + 1))


@pytest.mark.parametrize("length", LENGTHS)
def test_pairs(length):
    assert costs.causal_pairs(length) == count(length, lambda t, s: True)
    assert costs.window_pairs(length, 16) == count(length, lambda t, s: t - s < 16)
    assert costs.own_chunk_pairs(length, 16) == count(length, lambda t, s: t // 16 == s // 16)
    assert costs.earlier_chunks(length, 16) == sum(t // 16 for t in range(length))
    assert costs.complete_block_pairs(length, 16) == sum((t + 1) // 16 for t in range(length))
    for most in (1, 2, 9):
        assert costs.earlier_chunks(length, 16, most) == sum(min(t // 16, most) for t in range(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_operations(length):
    a_product = 2 * 8 * 4 * 3  # one pair: multiply and add over the head dim, for all heads and rows
    causal = count(length, lambda t, s: True)
    attention = costs.causal_attention(shape(length))
    assert attention == (2 * a_product * causal, 7 * a_product * causal)
    window = count(length, lambda t, s: t - s < 16)
    assert costs.window_attention(shape(length), 16) == (2 * a_product * window, 7 * a_product * window)
    seen = sum(t % 16 + 1 + 16 * min(t // 16, 2) for t in range(length))
    chunks = sum(t // 16 for t in range(length))
    for score, scored in (("approx", chunks), ("exact", 16 * chunks), ("exact_lse", 16 * chunks)):
        found = costs.top1_chunk(shape(length), score, chunk_size=16, top_k=2)
        assert found == (a_product * (scored + 2 * seen), a_product * (scored + 7 * seen))
    assert costs.top1_element(shape(length), "straight_through") == (a_product * causal, 6 * a_product * causal)
    assert costs.top1_element(shape(length), "selected") == (a_product * causal, 4 * a_product * causal)
    means = sum((t + 1) // 16 for t in range(length))
    chosen = sum(t % 16 + 1 + 16 * min(t // 16, 1) for t in range(length))
    found = costs.native_sparse_attention(shape(length), block_size=16, block_count=2)
    assert found == (a_product * (3 * means + 2 * chosen), a_product * (8 * means + 7 * chosen))


def test_usual_formulas_in_the_limit():
    t, d, h, c = 102_400, 128, 16, 128
    long = Shape(batch=1, length=t, heads=h, groups=h, head_dim=d)
    assert costs.causal_attention(long).forward == pytest.approx(2 * 2 * t**2 / 2 * d * h, rel=1e-3)
    attention = 4 * d * h * t * (c / 2 + c)
    approx, exact = (costs.top1_chunk(long, score, c, 1) for score in ("approx", "exact"))
    assert approx.forward == pytest.approx(t * (t / c) / 2 * 2 * d * h + attention, rel=1e-2)
    assert exact.forward == pytest.approx(2 * d * h * t**2 / 2 + attention, rel=1e-2)
    assert approx.for_pass("forward_backward") - approx.for_pass("forward") == pytest.approx(2.5 * attention, rel=1e-2)


def test_bytes():
    small = shape(10, groups=2)
    q, k = 2 * 3 * 10 * 4 * 8, 2 * 3 * 10 * 2 * 8
    assert costs.traffic_bytes(small, "forward") == q + k + k + q
    assert costs.traffic_bytes(small, "forward_backward") == (q + k + k + q) + (q + k + k + q + q) + (q + k + k)
    assert costs.baseline_bytes(small, "forward") == q + k + k + q
    assert costs.baseline_bytes(small, "forward_backward") == 2 * (q + k + k + q)
    assert costs.result_bytes(small, "forward") == q
    assert costs.result_bytes(small, "forward_backward") == q + (q + k + k)
