"""Stateful ops that use flash-linear-attention's kernels: conditions of use, and values on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from kernels.common import fla
from kernels.gated_linear_attention import gated_linear_attention
from kernels.rwkv6 import rwkv6
from kernels.rwkv7 import rwkv7


def fading(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Gated linear attention with one constant decay per head."""
    g = torch.tensor([-0.03, -0.5, -1e-4], device=q.device)
    return gated_linear_attention(q, k, v, g, **options)


OPS: dict[str, tuple[Callable[..., Any], str]] = {
    "linear attention": (gated_linear_attention, "q k v"),
    "decay of a head's own": (fading, "q k v"),
    "decay a head": (gated_linear_attention, "q k v g"),
    "decay a feature": (gated_linear_attention, "q k v gk"),
    "rwkv6": (rwkv6, "q k v gk u"),
    "rwkv7": (rwkv7, "q k v gk a b"),
    "rwkv7, decays within a bound": (partial(rwkv7, log_decay_bound=-0.6), "q k v bounded a b"),
}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend to run on a Hopper GPU with a given Triton version."""

    def pretend(triton: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(fla, "_version", lambda _: Version(triton))
        fla.hopper_unsupported_reason.cache_clear()

    return pretend


@pytest.mark.parametrize(("triton", "reason"), [("3.3.1", False), ("3.6.0", True), ("3.7.1", False)])
def test_fla_is_unsupported_on_hopper_with_some_triton_versions(hopper: Any, triton: str, reason: bool) -> None:
    hopper(triton)
    assert (fla.hopper_unsupported_reason() is not None) == reason


def test_hopper_reason_states_the_fix(hopper: Any) -> None:
    hopper("3.6.0")
    message = fla.hopper_unsupported_reason()
    assert message is not None
    assert message.startswith("flash-linear-attention refuses per-head decays on a Hopper GPU")
    assert message.endswith("under Triton 3.6.0, which computes wrong gradients for them: pip install 'triton>=3.7.1'")


def test_unsupported_fla_raises_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match=r"^implementation is 'fla', but the inputs are on cpu: move them to a GPU$"):
        gated_linear_attention(q, q, q, implementation="fla")
    monkeypatch.setattr(fla, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"is not installed: pip install flash-linear-attention$"):
        gated_linear_attention(q, q, q, implementation="fla")


def _inputs(length: int, key: int, value: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random inputs of all ops, [2, length, 3, ...], on the GPU."""
    gen = torch.Generator(device="cuda").manual_seed(length)

    def randn(*shape: int) -> Tensor:
        return torch.randn(2, length, 3, *shape, generator=gen, device="cuda")

    k, a = (torch.nn.functional.normalize(randn(key), dim=-1) for _ in range(2))
    rate = randn(key).sigmoid()
    inputs = {"q": randn(key), "k": k, "v": randn(value), "beta": randn().sigmoid(), "a": -a, "b": a * rate}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    decays = {"g": randn(), "gk": randn(key)}
    inputs |= {name: 0.6 * torch.nn.functional.logsigmoid(x) for name, x in decays.items()}
    inputs["bounded"] = -0.6 * randn(key).sigmoid()
    return inputs | {"u": torch.randn(3, key, generator=gen, device="cuda").to(dtype)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fla's kernels need a GPU")
@pytest.mark.parametrize("length", [1, 63, 200, 1000])
@pytest.mark.parametrize(("key", "value"), [(64, 64), (64, 128), (128, 128), (128, 256)])
@pytest.mark.parametrize("name", OPS)
def test_matches_plain_torch_on_a_gpu(name: str, key: int, value: int, length: int) -> None:
    op, arguments = OPS[name]
    if "g" in arguments.split():
        reason = fla.hopper_unsupported_reason()
        if reason is not None:
            pytest.skip(reason)
    drawn = _inputs(length, key, value, torch.bfloat16)
    state = torch.randn(2, 3, key, value, device="cuda")
    upstream = torch.randn(2, length, 3, value, device="cuda").bfloat16(), torch.randn_like(state)

    def run(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        def cast(x: Tensor) -> Tensor:
            return (x if dtype == torch.bfloat16 else x.to(dtype)).detach().requires_grad_()

        inputs = [None if n == "none" else cast(drawn[n]) for n in arguments.split()]
        first = cast(state)
        results = op(*inputs, initial_state=first, output_final_state=True, implementation=implementation)
        differentiable = [x for x in (*inputs, first) if x is not None]
        grads = torch.autograd.grad(
            results, differentiable, [g.to(r.dtype) for g, r in zip(upstream, results, strict=True)]
        )
        return [x.double() for x in (*results, *grads)]

    names = ["output", "state", *(f"d{n}" for n in arguments.split() if n != "none"), "dstate"]
    for label, found, expected in zip(names, run("fla", torch.bfloat16), run("chunked", torch.float64), strict=True):
        error = float((found - expected).norm() / expected.norm().clamp_min(1e-12))
        assert error < 5e-3, f"{label}: {error:.1e}"
