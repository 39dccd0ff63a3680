"""Holds a mixer to a layer of flash-linear-attention, whose Triton kernels are replaced by plain torch.

What fla itself has in plain torch takes the place of its kernels: the naive forms of its ops, its references of norms,
rotary embedding and token shift. The rest is written out here. Everything else is fla's own layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def fla(path: str) -> Any:
    """What stands in flash-linear-attention under a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"fla.{module}"), name)


def replace(monkeypatch: pytest.MonkeyPatch, replacements: Mapping[str, Any]) -> None:
    """Replace what stands in flash-linear-attention under each dotted path; where nothing stands, that is an error."""
    for path, replacement in replacements.items():
        module, _, name = path.rpartition(".")
        monkeypatch.setattr(import_module(f"fla.{module}"), name, replacement)


def op(path: str, arguments: str, *, heads_first: bool = False) -> Callable[..., Any]:
    """One of fla's plain ops, called by name as its layers call the kernel.

    Args:
        path: of the plain op.
        arguments: the kernel's names of what the plain op takes, in its order.
        heads_first: whether it takes and gives [b, h, t, ...] instead of [b, t, h, ...].
    """

    def call(**given: Any) -> tuple[Tensor, None]:
        inputs = [given.pop(name) for name in arguments.split()]
        given.pop("state_v_first", None)  # how a final state would be stored
        assert not any(given.values()), f"{path} knows nothing of {given}"
        if heads_first:
            inputs = [x.transpose(1, 2) for x in inputs]
        out = fla(path)(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        return (out.transpose(1, 2) if heads_first else out), None

    return call


def l2norm(x: Tensor) -> Tensor:
    """As fla's l2norm_fwd_kernel."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str, backend: str, **options: Any
) -> tuple[Tensor, None]:
    """x [b, t, d], weight [d, taps]."""
    assert activation == "silu"
    assert not any(option is not None and option is not False for option in options.values()), options
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2), None


def _rms_norm(x: Tensor, *, residual: None, residual_in_fp32: bool, **options: Any) -> Tensor:
    assert residual is None
    return fla("modules.norm.layernorm.rms_norm_ref")(x, **options)


def _rms_norm_gated(
    x: Tensor, *, g: Tensor, activation: str, residual: None, prenorm: bool, residual_in_fp32: bool, **options: Any
) -> Tensor:
    assert activation == "swish"
    assert residual is None
    assert not prenorm
    return fla("modules.norm.layernorm_gated.rms_norm_ref")(x, z=g, norm_before_gate=True, **options)


def _rotary_embedding(
    x: Tensor, *, cos: Tensor, sin: Tensor, interleaved: bool, seqlen_offsets: int, **options: Any
) -> Tensor:
    assert not any(options.values())
    assert seqlen_offsets == 0
    length = x.shape[1]
    return fla("modules.rotary.ops.rotary_embedding_ref")(x, cos[:length], sin[:length], interleaved)


MODULES: dict[str, Callable[..., Any]] = {
    "modules.norm.layernorm.rms_norm": _rms_norm,
    "modules.norm.fused_norm_gate.rms_norm_gated": _rms_norm_gated,
    "modules.norm.layernorm_gated.rmsnorm_fn": lambda **options: fla("modules.norm.layernorm_gated.rms_norm_ref")(
        **options
    ),
    "modules.causal_conv1d.ops.causal_conv1d": causal_conv1d,
    "modules.rotary.ops.rotary_embedding": _rotary_embedding,
}
"""What many of fla's layers are made of, in plain torch."""


def assert_close(found: Tensor, expected: Tensor, name: str = "output") -> None:
    """Within 1e-5 of the largest number: fp32 sums of terms of that size."""
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 1e-5 * largest, f"{name} is off by {error} beside {largest}"


def assert_same_function(
    mixer: Any, layer: torch.nn.Module, weights: Mapping[str, Tensor], hidden_states: Tensor
) -> None:
    """Compare outputs, and the gradients of the input and of each of the mixer's parameters.

    Args:
        mixer: ours.
        layer: fla's.
        weights: all of the layer's parameters by its names, made from the mixer's.
        hidden_states: [t, b, hidden].
    """
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: w.shape for n, w in weights.items()}
    x = hidden_states.clone().requires_grad_()
    leaves = {"input": x, **dict(mixer.named_parameters())}
    found = mixer(x)[0]
    out = torch.func.functional_call(layer, dict(weights), (x.transpose(0, 1),))
    expected = (out[0] if isinstance(out, tuple) else out).transpose(0, 1)
    assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    found_grads = torch.autograd.grad(found, list(leaves.values()), upstream)
    expected_grads = torch.autograd.grad(expected, list(leaves.values()), upstream)
    for leaf, a, b in zip(leaves, found_grads, expected_grads, strict=True):
        assert_close(a, b, leaf)
