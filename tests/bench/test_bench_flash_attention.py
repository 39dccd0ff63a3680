"""Replacement for flash-attn: its call sites in fla, and its values on a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from megatron_ext.bench.layers import flash_attention
from megatron_ext.bench.layers.flash_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    install_flash_attn_replacement,
)


@pytest.mark.filterwarnings("ignore")
def test_replacement_is_installed_in_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla")
    monkeypatch.setattr(flash_attention, "find_spec", lambda _: None)
    for module, names in flash_attention.CALLERS.items():
        for name in names:
            monkeypatch.setattr(import_module(module), name, None)  # asserts that fla has the name, and restores it
    assert install_flash_attn_replacement()
    assert import_module("fla.layers.attn").flash_attn_func is flash_attn_func
    assert import_module("fla.ops.moba.parallel")._flash_attn_varlen_backward is not None


def test_installed_flash_attn_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "find_spec", lambda _: "installed")
    monkeypatch.setattr(flash_attention, "import_module", None)
    assert not install_flash_attn_replacement()


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one sequence [t, h, d], optionally within a sliding window."""
    t = torch.arange(len(q), device=q.device)
    distance = t[:, None] - t
    seen = (distance >= 0) & (distance < (window or len(q)))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")
@pytest.mark.parametrize(("window", "groups"), [(None, 4), (None, 2), (37, 1)])
def test_values_and_gradients(window: int | None, groups: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, 200, heads, 64, generator=generator, device="cuda", dtype=torch.bfloat16)

    inputs, upstream = [draw(heads).requires_grad_() for heads in (4, groups, groups)], draw(4)
    sides = (-1, -1) if window is None else (window - 1, 0)
    of_batch = flash_attn_func(*inputs, causal=True, window_size=sides)
    packed = [x.flatten(0, 1) for x in inputs]
    starts = torch.tensor([0, 200, 400], device="cuda")
    of_packed = flash_attn_varlen_func(*packed, starts, starts, 200, 200, causal=True, window_size=sides)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.stack([plain(*(x[sample] for x in exact), window) for sample in range(2)])
    expected_grads = torch.autograd.grad(expected, exact, upstream.double())
    for out in (of_batch, of_packed.unflatten(0, (2, 200))):
        grads = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
        for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
            assert float((a - b).norm() / b.norm()) < 5e-3
