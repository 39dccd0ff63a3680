"""Fusion: the code around the ops is compiled only on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kernels.common import fusion


@fusion.fused
def half(x: Tensor, times: int = 1) -> Tensor:
    """Return half of x, times a factor."""
    return x * times / 2


def test_function_is_unchanged_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_compiled", None)
    assert half(torch.tensor(6.0), times=2).item() == 6.0
    assert half.__doc__ == "Return half of x, times a factor."


def test_function_is_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compiled(function: object, fullgraph: bool, dynamic: bool) -> object:
        seen.append((function, dynamic))
        return lambda orders, x, times: "compiled"

    monkeypatch.setattr(fusion, "_compiled", compiled)
    monkeypatch.setattr(fusion, "NUM_STATIC_SHAPES", 2)
    with FakeTensorMode():
        tensors = [torch.empty(n, device="cuda") for n in (3, 4, 5, 3, 6)]
    assert [half(x, times=2) for x in tensors] == ["compiled"] * 5
    assert [dynamic for _, dynamic in seen] == [False, False, True, False, True]
    with fusion.shapes_vary():
        assert half(tensors[0], times=2) == "compiled"
    half(tensors[0], times=2)
    assert [dynamic for _, dynamic in seen[5:]] == [None, False]
    assert len({function for function, _ in seen}) == 1, "as often, it would be compiled anew"


def test_function_is_not_compiled_inside_another() -> None:
    whole = torch.compile(lambda x: half(x) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(torch.ones(2)), torch.full((2,), 1.5))


@fusion.fused
def products(x: Tensor, y: Tensor, z: Tensor, power: int) -> tuple[Tensor, ...]:
    """Powers of transposed tensors. The results have another memory layout than the inputs."""
    return tuple((a.transpose(0, 1) ** power).contiguous() for a in (x, y, z))


def test_gradients_have_the_layout_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_runs_compiled", lambda _: not torch.compiler.is_compiling())
    monkeypatch.setattr(fusion, "_compiled", lambda f, *_: torch.compile(f, backend="aot_eager", fullgraph=True))
    x, y, constant = torch.randn(3, 4, 5), torch.randn(5, 4, 9)[..., :3].permute(2, 1, 0), torch.randn(3, 4, 5)
    inputs = [x.requires_grad_(), y.requires_grad_()]
    out = products(*inputs, constant, 2)[:2]
    found = torch.autograd.grad(out, inputs, [torch.ones(4, 3, 5)] * 2)
    for tensor, grad in zip(inputs, found, strict=True):
        torch.testing.assert_close(grad, 2 * tensor.detach())
    assert found[0].is_contiguous()
    assert found[1].permute(2, 1, 0).is_contiguous()


def test_backward_of_cut_uses_the_shape_mode_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on a GPU are computed in torch's own thread, outside the context managers around the call."""
    seen: list[bool | None] = []

    def compiled(function: Callable[..., object], fullgraph: bool, dynamic: bool | None) -> Callable[..., object]:
        seen.append(dynamic)
        return function

    monkeypatch.setattr(fusion, "_runs_compiled", lambda _: True)
    monkeypatch.setattr(fusion, "_compiled", compiled)
    x = torch.randn(3, 5, requires_grad=True)
    with fusion.shapes_vary():
        varying = fusion.cut(x, [2, 3])
    for views in (varying, fusion.cut(x, [2, 3])):
        with ThreadPoolExecutor() as thread:
            (grad,) = thread.submit(torch.autograd.grad, sum(v.sum() for v in views), x).result()
        assert torch.equal(grad, torch.ones(3, 5))
    assert seen == [None, False]


@pytest.mark.parametrize("padding", [0, 3])
def test_gradient_of_cut(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    widths = [4, 2, 0, 1]
    x = torch.randn(3, 5, sum(widths) + padding, requires_grad=True)
    upstream = [torch.randn(3, 5, width) for width in widths]

    def gradient() -> Tensor:
        views = fusion.cut(x, widths)
        assert [view.shape[-1] for view in views] == widths
        for view, expected in zip(views, x.split([*widths, padding], -1)[:-1], strict=True):
            assert torch.equal(view, expected)
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        (grad,) = torch.autograd.grad([view for view in views if view.shape[-1]], x, [u for u in upstream if u.numel()])
        return grad

    plain = gradient()
    assert torch.equal(plain, torch.cat([*upstream, torch.zeros(3, 5, padding)], -1))
    monkeypatch.setattr(fusion, "_runs_compiled", lambda _: not torch.compiler.is_compiling())
    monkeypatch.setattr(fusion, "_compiled", lambda f, *_: torch.compile(f, backend="aot_eager", fullgraph=True))
    assert torch.equal(gradient(), plain)
