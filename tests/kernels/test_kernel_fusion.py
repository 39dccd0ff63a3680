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

    def compiled(function: object) -> object:
        seen.append(function)
        return lambda x, times: "compiled"

    monkeypatch.setattr(fusion, "compiled", compiled)
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
    assert half(x, times=2) == "compiled"
    assert seen == [half.__wrapped__]  # type: ignore[attr-defined]


def test_inside_another_compiled_function_it_is_not_compiled_again() -> None:
    whole = torch.compile(lambda x: half(x) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(torch.ones(2)), torch.full((2,), 1.5))
