"""Code of mixers around their ops, compiled as on a GPU: each part is one graph and gives the values of plain code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common import fusion

MIXERS = [
    "attention",
    "based",
    "deltanet",
    "gated_deltanet",
    "gla",
    "linear_attention",
    "mamba",
    "mamba2",
    "nsa",
    "retnet",
    "rwkv6",
    "rwkv7",
]


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Enable compilation on the CPU, without code generation. The fixture returns the compiled functions."""
    seen: list[Any] = []

    def compile_plainly(function: Any, *_: Any) -> Any:
        seen.append(function)
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    def begin() -> list[Any]:
        monkeypatch.setattr(fusion, "_runs_compiled", lambda _: not torch.compiler.is_compiling())
        monkeypatch.setattr(fusion, "_compiled", compile_plainly)
        return seen

    yield begin
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MIXERS)
def test_compiled_equals_eager(
    make_mixer: Callable[..., Any], hidden_states: Tensor, compiled_here: Callable[[], list[Any]], name: str
) -> None:
    mixer = make_mixer(name)
    weights = list(mixer.parameters())

    def run() -> list[Tensor]:
        x = hidden_states.clone().requires_grad_()
        out, _ = mixer(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *weights])]

    expected = run()
    seen = compiled_here()
    found = run()
    assert seen
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
