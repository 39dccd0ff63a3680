"""RWKV-6 and RWKV-7, from input to output, against the layers of flash-linear-attention with its ops in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("fla", reason="flash-linear-attention is not installed")

MakeMixer = Callable[..., Any]
HIDDEN, HEADS, HEAD_DIM, LAYERS = 24, 4, 6, 1


def _first(values: list[Tensor]) -> Tensor:
    return torch.stack(values, 1)


def _wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Finch, equation 19: read the state and the present token, then fade and write."""
    state, outputs = torch.zeros(*v.shape[:1], *v.shape[2:], v.shape[-1]), []
    for t in range(r.shape[1]):
        written = k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhd,bhde->bhe", r[:, t], state + u[..., None] * written))
        state = w[:, t, ..., None].exp() * state + written
    return _first(outputs), None


def _wkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float, **_: Any
) -> tuple[Tensor, None]:
    """By fla's own recurrence, which divides the receptance by sqrt(d)."""
    recurrence = import_module("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    assert scale == 1.0
    q, k, v, a, b, w = (x.transpose(1, 2) for x in (r * r.shape[-1] ** 0.5, k, v, a, b, w))
    return recurrence(q, k, v, a, b, w)[0].transpose(1, 2), None


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], torch.nn.Module]:
    """fla's layer on the CPU: what runs as Triton kernels there is replaced by fla's references or a loop."""

    def shift(x: Tensor, _: Any = None, output_cache: bool = False, **__: Any) -> Any:
        found = import_module("fla.modules.token_shift").token_shift_ref(x)
        return (found, None) if output_cache else found

    def make(name: str, layer_idx: int = 0, layers: int = 2) -> torch.nn.Module:
        module, ops = import_module(f"fla.layers.{name}"), import_module(f"fla.ops.{name}")
        monkeypatch.setattr(module, "token_shift", shift)
        sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "layer_idx": layer_idx}
        if name == "rwkv6":
            monkeypatch.setattr(module, "fused_recurrent_rwkv6", _wkv6)
            layer = module.RWKV6Attention(expand_k=1.0, **sizes)
            layer.g_norm, layer.gate_fn = _GroupNorm(HEADS, HIDDEN, eps=1e-5 * HEAD_DIM), torch.nn.functional.silu
            return layer
        monkeypatch.setattr(module, "chunk_rwkv7", _wkv7)
        for op, reference in (
            ("fused_addcmul_rwkv7", ops.fused_addcmul.torch_addcmul_rwkv7),
            ("fused_k_rwkv7", ops.fused_k_update.k_update_ref),
            ("gate_output_correction", ops.gate_output_correction.gate_output_correction_ref),
        ):
            monkeypatch.setattr(module, op, reference)
        return module.RWKV7Attention(head_dim=None, num_hidden_layers=layers, **sizes)

    return make


class _GroupNorm(torch.nn.GroupNorm):
    """torch's, over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view(x.shape)


def _rwkv6_weights(mixer: Any) -> dict[str, Tensor]:
    """The mixer's weights by fla's names, whose mixtures come as r, w, k, v, g."""
    order = [3, 0, 1, 2, 4]
    return {
        "x_bias": mixer.mu[order],
        "bonus": mixer.bonus,
        "x_proj.0.mu": mixer.mu_of_mixing,
        "x_proj.0.linear.weight": mixer.mix_down[order].flatten(0, 1),
        "x_proj.2.weight": mixer.mix_up[order].transpose(0, 1).flatten(1),
        "r_proj.linear.weight": mixer.r_proj.flatten(0, 1),
        "w_proj.linear.lora.0.weight": mixer.decay_down,
        "w_proj.linear.lora.2.weight": mixer.decay_up.flatten(0, 1),
        "w_proj.linear.lora.2.bias": mixer.decay_base.flatten(),
        "k_proj.linear.weight": mixer.k_proj.flatten(0, 1),
        "v_proj.linear.weight": mixer.v_proj.flatten(0, 1),
        "g_proj.linear.weight": mixer.g_proj.flatten(0, 1),
        "g_norm.weight": mixer.group_norm_weight.flatten(),
        "g_norm.bias": mixer.group_norm_bias.flatten(),
        "o_proj.weight": mixer.out_proj.weight,
    }


def _rwkv7_weights(mixer: Any) -> dict[str, Tensor]:
    weights = {f"x_{name}": mixer.mu[i][None, None] for i, name in enumerate("rwkvag")}
    weights |= {"k_k": mixer.removal_scale.flatten(), "k_a": mixer.key_rate.flatten(), "r_k": mixer.bonus}
    weights |= {f"{name}_proj.weight": getattr(mixer, f"{name}_proj").flatten(0, 1) for name in "rkv"}
    for name, ours in (("w", "decay"), ("a", "rate"), ("g", "gate")):
        weights[f"{name}_lora.lora.0.weight"] = getattr(mixer, f"{ours}_down")
        weights[f"{name}_lora.lora.2.weight"] = getattr(mixer, f"{ours}_up").flatten(0, 1)
        if ours != "gate":
            weights[f"{name}_lora.lora.2.bias"] = getattr(mixer, f"{ours}_base").flatten()
    norm = {"g_norm.weight": mixer.group_norm_weight.flatten(), "g_norm.bias": mixer.group_norm_bias.flatten()}
    return weights | norm | {"o_proj.weight": mixer.out_proj.weight}


WEIGHTS = {"rwkv6": _rwkv6_weights, "rwkv7": _rwkv7_weights}


def _assert_close(found: Tensor, expected: Tensor, name: str = "output") -> None:
    """Within 1e-5 of the largest number: fp32 sums of terms of that size."""
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 1e-5 * largest, f"{name} is off by {error} beside {largest}"


@pytest.mark.parametrize("name", WEIGHTS)
def test_outputs_and_gradients_are_those_of_flash_linear_attention(
    make_mixer: MakeMixer, theirs: Any, hidden_states: Tensor, name: str
) -> None:
    mixer, layer = make_mixer(name), theirs(name)
    with torch.no_grad():  # weights at which an error of rounding in a decay's logit does not grow
        for parameter in mixer.parameters():
            parameter.mul_(0.5)
    weights = WEIGHTS[name](mixer)
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: w.shape for n, w in weights.items()}
    x = hidden_states.clone().requires_grad_()
    leaves = {"input": x, **dict(mixer.named_parameters())}
    found = mixer(x)[0]
    expected = torch.func.functional_call(layer, weights, (x.transpose(0, 1),))[0].transpose(0, 1)
    _assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    found_grads = torch.autograd.grad(found, list(leaves.values()), upstream)
    expected_grads = torch.autograd.grad(expected, list(leaves.values()), upstream)
    for leaf, a, b in zip(leaves, found_grads, expected_grads, strict=True):
        _assert_close(a, b, leaf)
