"""Compiled functions act as one kernel on meta tensors: they save and return exactly what the function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meta_tensors import kept_by, meta
from torch import Tensor

from kernels.meta.fused_call import as_one_kernel, one_kernel, within_one_kernel


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


calls: list[torch.Size] = []


def counted(x: Tensor, factor: float) -> Tensor:
    calls.append(x.shape)
    return x * factor


def test_what_is_known_by_its_forms_is_gone_through_once() -> None:
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


def test_equal_numbers_of_two_kinds_are_two_forms() -> None:
    whole = meta(4, dtype=torch.int64, requires_grad=False)
    found = [as_one_kernel(counted, whole, factor).dtype for factor in (2, 2.0, True)]
    assert found == [torch.int64, torch.float32, torch.int64]


def views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Parts of inputs, and two parts of one product."""
    left, right = (x * y).chunk(2, -1)
    return x[1:], left, right.transpose(0, 1), y.flatten()


def spread(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The first's gradient is one number, seen everywhere; the second has none."""
    return x.sum(), y.detach().exp(), (y > 0), x.float().cumsum(0).to(x.dtype)


def gated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Needs what comes between for its backward pass."""
    return (torch.cat([x.sigmoid() * y, y.tanh() * x], -1),)


@pytest.mark.parametrize("function", [views, spread, gated])
@pytest.mark.parametrize("are_of_one", [False, True])
def test_what_is_known_is_made_as_if_gone_through(
    function: Callable[..., tuple[Tensor, ...]], are_of_one: bool
) -> None:
    def through(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return function(x, y)

    def made(called: Callable[..., Any]) -> tuple[Any, ...]:
        whole = meta(6, 16)
        inputs = [part.T for part in whole.chunk(2, -1)] if are_of_one else [meta(8, 6), meta(8, 6).detach()]
        results: list[Tensor] = []

        def call() -> list[Tensor]:
            results[:] = as_one_kernel(called, *inputs)
            return results

        kept = kept_by(call)
        wanted = [x for x in inputs if x.requires_grad]
        learned = [x for x in results if x.requires_grad]
        grads = torch.autograd.grad(learned, wanted, [x.detach().clone() for x in learned], allow_unused=True)
        shown = [*inputs, *results]
        return kept, _lie(shown), [g is None for g in grads], _lie([g for g in grads if g is not None])

    assert function.__closure__ is None  # type: ignore[attr-defined]
    assert made(through) == made(function) == made(function)


def _lie(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """How tensors lie in memory, and which of them in one."""
    numbers: dict[int, int] = {}
    for x in tensors:
        numbers.setdefault(x.untyped_storage()._cdata, len(numbers))
    return [
        (numbers[s._cdata], s.nbytes(), x.shape, x.stride(), x.storage_offset(), x.dtype, x.requires_grad)
        for x in tensors
        for s in [x.untyped_storage()]
    ]
