"""Compiled functions as one kernel on meta tensors: results, saved tensors and cached calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meta_tensors import meta, saved_sizes
from torch import Tensor

from kernels.meta.fused_call import as_one_kernel, one_kernel, within_one_kernel


def swish(x: Tensor, gate: Tensor, factor: float) -> dict[str, Any]:
    """Save several intermediate tensors; return tensors and other values."""
    return {"product": (x.sigmoid() * gate.tanh() * (x * gate).exp() * factor, "label"), "positive": x > 0}


def test_one_kernel_returns_the_structure_and_layout_of_the_function() -> None:
    x, gate = meta(4, 8), meta(4, 8)
    found = as_one_kernel(swish, x, gate, factor=2.0)
    product, label = found["product"]
    assert label == "label"
    assert product.shape == (4, 8)
    assert product.dtype == torch.bfloat16
    assert product.requires_grad
    assert found["positive"].dtype == torch.bool
    assert not found["positive"].requires_grad
    torch.autograd.backward(product, torch.empty_like(product))
    for given in (x, gate):
        assert given.grad is not None
        assert given.grad.shape == (4, 8)


def test_one_kernel_saves_its_inputs_if_they_are_smaller_than_intermediates() -> None:
    x, gate = meta(4, 8), meta(4, 8)
    assert saved_sizes(lambda: as_one_kernel(swish, x, gate, factor=2.0)) == [4 * 8 * 2] * 2


def test_one_kernel_saves_less_than_its_inputs_if_that_suffices() -> None:
    x, angles = meta(64, 8), meta(8, requires_grad=False)
    assert saved_sizes(lambda: as_one_kernel(torch.mul, x, angles)) == [8 * 2]


def test_within_one_kernel_is_true_in_both_passes() -> None:
    inside: list[bool] = []

    def function(x: Tensor) -> Tensor:
        inside.append(within_one_kernel())
        return x * 2

    x = meta(4)
    torch.autograd.backward(as_one_kernel(function, x), meta(4, requires_grad=False))
    assert inside == [True, True]
    assert not within_one_kernel()
    with one_kernel(), one_kernel():
        assert within_one_kernel()
    assert not within_one_kernel()


calls: list[torch.Size] = []


def counted(x: Tensor, factor: float) -> Tensor:
    calls.append(x.shape)
    return x * factor


def test_call_with_equal_arguments_runs_the_function_once() -> None:
    calls.clear()
    for _ in range(3):
        found = as_one_kernel(counted, meta(4, 8), 2.0)
        torch.autograd.backward(found, meta(4, 8, requires_grad=False))
    once = [torch.Size([4, 8])] * 2  # forward, and for the backward pass
    assert calls == once
    as_one_kernel(counted, meta(4, 8), 3.0)
    as_one_kernel(counted, meta(4, 8).T, 2.0)
    as_one_kernel(counted, meta(4, 8, dtype=torch.float32), 2.0)
    assert calls == [*once, torch.Size([4, 8]), torch.Size([8, 4]), torch.Size([4, 8])]


def test_equal_numbers_of_different_types_are_cached_apart() -> None:
    whole = meta(4, dtype=torch.int64, requires_grad=False)
    found = [as_one_kernel(counted, whole, factor).dtype for factor in (2, 2.0, True)]
    assert found == [torch.int64, torch.float32, torch.int64]


def views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return views of the inputs, and two views of one product."""
    left, right = (x * y).chunk(2, -1)
    return x[1:], left, right.transpose(0, 1), y.flatten()


def spread(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return a sum, whose gradient is an expanded scalar, and outputs without a gradient."""
    return x.sum(), y.detach().exp(), (y > 0), x.float().cumsum(0).to(x.dtype)


def gated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Need intermediate tensors for the backward pass."""
    return (torch.cat([x.sigmoid() * y, y.tanh() * x], -1),)


@pytest.mark.parametrize("function", [views, spread, gated])
@pytest.mark.parametrize("share_storage", [False, True])
def test_cached_call_returns_the_same_as_running_the_function(
    function: Callable[..., tuple[Tensor, ...]], share_storage: bool
) -> None:
    def not_cached(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return function(x, y)  # the closure prevents caching

    def results_of(called: Callable[..., Any]) -> tuple[Any, ...]:
        whole = meta(6, 16)
        inputs = [part.T for part in whole.chunk(2, -1)] if share_storage else [meta(8, 6), meta(8, 6).detach()]
        results: list[Tensor] = []

        def call() -> list[Tensor]:
            results[:] = as_one_kernel(called, *inputs)
            return results

        sizes = saved_sizes(call)
        wrt = [x for x in inputs if x.requires_grad]
        outputs = [x for x in results if x.requires_grad]
        grads = torch.autograd.grad(outputs, wrt, [x.detach().clone() for x in outputs], allow_unused=True)
        tensors = [*inputs, *results]
        return sizes, _layouts(tensors), [g is None for g in grads], _layouts([g for g in grads if g is not None])

    assert function.__closure__ is None  # type: ignore[attr-defined]
    assert results_of(not_cached) == results_of(function) == results_of(function)


def _layouts(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """Return the layouts of tensors, with numbered storages."""
    numbers: dict[int, int] = {}
    for x in tensors:
        numbers.setdefault(x.untyped_storage()._cdata, len(numbers))
    return [
        (numbers[s._cdata], s.nbytes(), x.shape, x.stride(), x.storage_offset(), x.dtype, x.requires_grad)
        for x in tensors
        for s in [x.untyped_storage()]
    ]
