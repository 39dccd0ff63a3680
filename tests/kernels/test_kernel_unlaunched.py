"""Ops on meta tensors keep and return what their forms on a GPU do, and are as they were afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.softmax_attention import softmax_attention
from kernels.top1_chunk import top1_chunk_attention
from kernels.unlaunched import as_one_kernel, one_kernel, unlaunched, within_one_kernel


def meta(*shape: int, requires_grad: bool = True, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=requires_grad)


def kept_by(call: Callable[[], Any]) -> list[int]:
    """Sizes of the tensors that autograd keeps of a call."""
    found: dict[int, int] = {}

    def note(x: Tensor) -> None:
        found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        results = call()
    assert results is not None
    return sorted(found.values())


def swish(x: Tensor, gate: Tensor, factor: float) -> dict[str, Any]:
    """Keeps several things between; returns tensors among others."""
    return {"product": (x.sigmoid() * gate.tanh() * (x * gate).exp() * factor, "told"), "positive": x > 0}


def test_one_kernel_returns_what_the_function_does() -> None:
    x, gate = meta(4, 8), meta(4, 8)
    found = as_one_kernel(swish, x, gate, factor=2.0)
    product, told = found["product"]
    assert told == "told"
    assert product.shape == (4, 8)
    assert product.dtype == torch.bfloat16
    assert product.requires_grad
    assert found["positive"].dtype == torch.bool
    assert not found["positive"].requires_grad
    torch.autograd.backward(product, torch.empty_like(product))
    for given in (x, gate):
        assert given.grad is not None
        assert given.grad.shape == (4, 8)


def test_one_kernel_keeps_its_inputs_where_what_comes_between_is_more() -> None:
    x, gate = meta(4, 8), meta(4, 8)
    assert kept_by(lambda: as_one_kernel(swish, x, gate, factor=2.0)) == [4 * 8 * 2] * 2


def test_one_kernel_keeps_less_than_its_inputs_where_that_is_enough() -> None:
    x, angles = meta(64, 8), meta(8, requires_grad=False)
    assert kept_by(lambda: as_one_kernel(torch.mul, x, angles)) == [8 * 2]


def test_one_kernel_says_that_it_is_one() -> None:
    said: list[bool] = []

    def function(x: Tensor) -> Tensor:
        said.append(within_one_kernel())
        return x * 2

    x = meta(4)
    torch.autograd.backward(as_one_kernel(function, x), meta(4, requires_grad=False))
    assert said == [True, True]
    assert not within_one_kernel()
    with one_kernel(), one_kernel():
        assert within_one_kernel()
    assert not within_one_kernel()


@pytest.mark.parametrize("window", [None, 16])
def test_attention_keeps_no_scores(window: int | None) -> None:
    q, k, v = (meta(1, 4096, 2, 64) for _ in range(3))
    with unlaunched():
        sizes = kept_by(lambda: softmax_attention(q, k, v, window=window))
    assert max(sizes) <= 4096 * 2 * 64 * 2
    assert sizes.count(4096 * 2 * 64 * 2) >= 3


def test_top1_chunk_keeps_what_its_kernels_take() -> None:
    q, k, v = (meta(1, 4096, 2, 64) for _ in range(3))
    with unlaunched():
        sizes = kept_by(lambda: top1_chunk_attention(q, k, v, chunk_size=128))
    inputs_and_output, per_row = 4096 * 2 * 64 * 2, 4096 * 2 * 4
    assert sizes == [per_row] * 2 + [inputs_and_output] * 4


def test_kernels_are_launched_again_afterwards() -> None:
    from kernels.linear_cross_entropy import triton_rows

    logits = torch.zeros(2, 4)
    label = torch.tensor([0, 3])
    with unlaunched():
        shapes = triton_rows.statistics(meta(2, 4), torch.empty(2, dtype=torch.int64, device="meta"), 0)
    assert shapes.is_meta
    if not torch.cuda.is_available():  # Triton's interpreter
        highest, total, own = triton_rows.statistics(logits, label, 0)
        assert highest.tolist() == [0, 0]
        assert total.tolist() == [4, 4]
        assert own.tolist() == [0, 0]
