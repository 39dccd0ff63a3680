"""Stateful ops, compared with flash-linear-attention's plain torch functions: outputs and gradients in fp32."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.based import based
from kernels.gated_delta_rule import gated_delta_rule
from kernels.gated_linear_attention import gated_linear_attention
from kernels.rwkv6 import rwkv6
from kernels.rwkv7 import rwkv7

# Not `importorskip`: importing fla imports torch's compiler, in each test worker.
pytestmark = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")

BATCH, LENGTH, HEADS, KEY, VALUE = 2, 70, 3, 16, 24
Op = Callable[..., Any]


def fla(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"fla.ops.{module}"), name)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _inputs() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(17)

    def randn(*shape: int) -> Tensor:
        return torch.randn(BATCH, LENGTH, HEADS, *shape, generator=gen)

    key, a = randn(KEY), randn(KEY)
    rate = torch.rand(BATCH, LENGTH, HEADS, KEY, generator=gen)
    return {
        "q": randn(KEY),
        "k": key / key.norm(dim=-1, keepdim=True),
        "v": randn(VALUE),
        "g": -0.3 * torch.rand(BATCH, LENGTH, HEADS, generator=gen),
        "gk": -0.3 * torch.rand(BATCH, LENGTH, HEADS, KEY, generator=gen),
        "beta": torch.rand(BATCH, LENGTH, HEADS, generator=gen),
        "a": -a / a.norm(dim=-1, keepdim=True),
        "b": rate * a / a.norm(dim=-1, keepdim=True),
        "u": torch.randn(HEADS, KEY, generator=gen),
    }


def _retention_decay(v: Tensor) -> Tensor:
    """Return RetNet's log decays: head h decays by 1 - 2^(-5-h) per token."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(HEADS))).expand(*v.shape[:2], -1)


CASES: dict[str, tuple[str, Op, Op]] = {
    "gated delta rule": (
        "q k v g beta",
        gated_delta_rule,
        lambda q, k, v, g, beta: fla("gated_delta_rule.naive.naive_recurrent_gated_delta_rule")(q, k, v, beta, g),
    ),
    "delta rule": (
        "q k v beta",
        lambda q, k, v, beta: gated_delta_rule(q, k, v, torch.zeros_like(beta), beta),
        lambda *x: _heads_first(fla("delta_rule.naive.delta_rule_recurrence"), *x),
    ),
    "gated linear attention": ("q k v gk", gated_linear_attention, lambda *x: fla("gla.naive.naive_recurrent_gla")(*x)),
    "linear attention": (
        "q k v",
        gated_linear_attention,
        lambda *x: fla("linear_attn.naive.naive_recurrent_linear_attn")(*x),
    ),
    "retention": (
        "q k v",
        lambda q, k, v: gated_linear_attention(q, k, v, _retention_decay(v)),
        lambda *x: _heads_first(fla("retention.naive.naive_retention"), *x),
    ),
    "based": ("q k v", based, lambda *x: _heads_first(fla("based.naive.naive_parallel_based"), *x)),
    "rwkv6": (
        "q k v gk u",
        rwkv6,
        lambda *x: _heads_first(fla("rwkv6.recurrent_naive.naive_recurrent_rwkv6"), *x[:4], u=x[4], scale=1.0),
    ),
    "rwkv7": (
        "q k v gk a b",
        rwkv7,
        lambda r, k, v, g, a, b: _heads_first(
            fla("generalized_delta_rule.dplr.naive.dplr_recurrence"), r * KEY**0.5, k, v, a, b, g
        ),
    ),
}


def _heads_first(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Tensor:
    return first(function(*(x.transpose(1, 2) for x in inputs), **options)).transpose(1, 2)


@pytest.mark.parametrize("name", CASES)
def test_matches_flash_linear_attention(name: str) -> None:
    arguments, ours, fla_op = CASES[name]
    inputs = [_inputs()[argument].requires_grad_() for argument in arguments.split()]
    expected = first(fla_op(*inputs))
    found = first(ours(*inputs))
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(18))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    for argument, a, b in zip(
        arguments.split(), torch.autograd.grad(found, inputs, upstream), expected_grads, strict=True
    ):
        assert float((a - b).norm() / b.norm()) < 1e-5, argument
