"""Work around the ops is compiled on a GPU, and there alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kernels import fusion


@fusion.fused
def half(x: Tensor, times: int = 1) -> Tensor:
    """A half, times something."""
    return x * times / 2


def test_on_a_cpu_the_function_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "compiled", None)
    assert half(torch.tensor(6.0), times=2).item() == 6.0
    assert half.__doc__ == "A half, times something."


def test_on_a_gpu_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compiled(function: object, *, dynamic: bool) -> object:
        seen.append((function, dynamic))
        return lambda x, times: "compiled"

    monkeypatch.setattr(fusion, "compiled", compiled)
    monkeypatch.setattr(fusion, "OWN_SHAPES", 2)
    with FakeTensorMode():
        tensors = [torch.empty(n, device="cuda") for n in (3, 4, 5, 3, 6)]
    assert [half(x, times=2) for x in tensors] == ["compiled"] * 5
    plain = half.__wrapped__  # type: ignore[attr-defined]
    assert seen == [(plain, False), (plain, False), (plain, True), (plain, False), (plain, True)]


def test_inside_another_compiled_function_it_is_not_compiled_again() -> None:
    whole = torch.compile(lambda x: half(x) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(torch.ones(2)), torch.full((2,), 1.5))


def test_a_gradient_lies_as_the_tensor_does_when_compiled_too() -> None:
    def transposed(x: Tensor) -> Tensor:
        return fusion.contiguous_gradient(x).transpose(0, 1).exp()

    x = torch.randn(3, 4, 5, requires_grad=True)
    for function in (transposed, torch.compile(transposed, backend="aot_eager", fullgraph=True)):
        out = function(x)
        (found,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert found.is_contiguous()
        torch.testing.assert_close(found, x.detach().exp())
