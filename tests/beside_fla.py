"""Comparison of a mixer with a layer of flash-linear-attention, whose Triton kernels are replaced by plain torch.

fla's own plain torch code replaces its kernels where it exists: the naive forms of its ops, and its references of
norms, rotary embedding and token shift. Other replacements are written here. Everything else is fla's own layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_flash_attention import flash_attn_func, varlen_backward, varlen_forward
from torch import Tensor

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.huggingface.families import FAMILIES
from megatron_ext.conversion.huggingface.families.one_mixer import OneMixerFamily
from megatron_ext.mixers.core.registry import load_all


def fla(path: str) -> Any:
    """Return the object of flash-linear-attention at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"fla.{module}"), name)


def replace(monkeypatch: pytest.MonkeyPatch, replacements: Mapping[str, Any]) -> None:
    """Replace the objects of flash-linear-attention at dotted paths. Raise an error if a path does not exist."""
    for path, replacement in replacements.items():
        module, _, name = path.rpartition(".")
        monkeypatch.setattr(import_module(f"fla.{module}"), name, replacement)


def later(path: str) -> Callable[..., Any]:
    """Return a function of fla that is imported when called."""
    return lambda *inputs, **given: fla(path)(*inputs, **given)


def op(path: str, arguments: str, *, heads_first: bool = False) -> Callable[..., Any]:
    """Wrap one of fla's plain ops, so that it can be called with keywords as fla's layers call the kernel.

    Args:
        path: dotted path of the plain op.
        arguments: the kernel's keywords for the arguments of the plain op, in its order.
        heads_first: whether the plain op takes and returns [b, h, t, ...] instead of [b, t, h, ...].
    """

    def call(**given: Any) -> tuple[Tensor, None]:
        inputs = [given.pop(name) for name in arguments.split()]
        given.pop("state_v_first", None)  # layout of the final state
        assert not any(given.values()), f"{path} knows nothing of {given}"
        if heads_first:
            inputs = [x.transpose(1, 2) for x in inputs]
        out = fla(path)(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        return (out.transpose(1, 2) if heads_first else out), None

    return call


def _l2norm(x: Tensor) -> Tensor:
    """Same formula as fla's l2norm_fwd_kernel."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str, backend: str, **options: Any
) -> tuple[Tensor, None]:
    """Causal convolution of x [b, t, d] with weight [d, taps]."""
    assert activation == "silu"
    assert all(option is None or option is False for option in options.values()), options
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2), None


def _rms_norm(x: Tensor, *, residual_in_fp32: bool, **options: Any) -> Any:
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


def _delta_rule(*, q: Tensor, k: Tensor, use_qk_l2norm_in_kernel: bool, **given: Any) -> tuple[Tensor, None]:
    assert use_qk_l2norm_in_kernel
    plain = op("ops.delta_rule.naive.delta_rule_recurrence", "q k v beta", heads_first=True)
    return plain(q=_l2norm(q), k=_l2norm(k), **given)


def _gated_delta_rule(
    *, q: Tensor, k: Tensor, beta: Tensor, g: Tensor, A_log: Tensor, dt_bias: Tensor, **given: Any
) -> tuple[Tensor, None]:
    for done_here in ("qk_l2norm", "beta_sigmoid", "gate"):
        assert given.pop(f"use_{done_here}_in_kernel")
    g = fla("ops.gated_delta_rule.gate.naive_gdn_gate")(g, A_log, dt_bias)
    plain = op("ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule", "q k v beta g")
    return plain(q=_l2norm(q), k=_l2norm(k), beta=beta.sigmoid(), g=g, **given)


def _based(*, scale: float, use_norm: bool, **given: Any) -> Tensor:
    assert use_norm
    assert scale == given["q"].shape[-1] ** -0.5  # the scale of the plain op
    return op("ops.based.naive.naive_parallel_based", "q k v", heads_first=True)(**given)[0]


def _wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **_: Any) -> tuple[Tensor, None]:
    """RWKV-6 recurrence (Finch, equation 19): read the state and the current token, then decay and write."""
    state, outputs = torch.zeros(*v.shape[:1], *v.shape[2:], v.shape[-1]), []
    for t in range(r.shape[1]):
        written = k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhd,bhde->bhe", r[:, t], state + u[..., None] * written))
        state = w[:, t, ..., None].exp() * state + written
    return torch.stack(outputs, 1), None


def _wkv7(*, r: Tensor, scale: float, **given: Any) -> tuple[Tensor, None]:
    """RWKV-7 by fla's own recurrence, which divides the receptance by sqrt(d)."""
    assert scale == 1.0
    for of_the_kernel in ("safe_gate", "lower_bound", "chunk_size"):
        given.pop(of_the_kernel)
    recurrence = op("ops.generalized_delta_rule.dplr.naive.dplr_recurrence", "q k v a b w", heads_first=True)
    return recurrence(q=r * r.shape[-1] ** 0.5, **given)


def _shift(x: Tensor, _: Any = None, output_cache: bool = False, **__: Any) -> Any:
    found = fla("modules.token_shift.token_shift_ref")(x)
    return (found, None) if output_cache else found


def _mean_pooling(x: Tensor, block_size: int, cu_seqlens: None) -> Tensor:
    return torch.stack([block.mean(1) for block in x.split(block_size, 1)], 1)


PLAIN: dict[str, Any] = {
    # Parts of many layers.
    "modules.norm.layernorm.rms_norm": _rms_norm,
    "modules.norm.fused_norm_gate.rms_norm_gated": _rms_norm_gated,
    "modules.norm.layernorm_gated.rmsnorm_fn": later("modules.norm.layernorm_gated.rms_norm_ref"),
    "modules.causal_conv1d.ops.causal_conv1d": _causal_conv1d,
    "modules.rotary.ops.rotary_embedding": _rotary_embedding,
    # Ops of single layers.
    "layers.gla.fused_recurrent_gla": op("ops.gla.naive.naive_recurrent_gla", "q k v gk"),
    "layers.multiscale_retention.chunk_retention": op("ops.retention.naive.naive_retention", "q k v", heads_first=True),
    "layers.linear_attn.chunk_linear_attn": op("ops.linear_attn.naive.naive_recurrent_linear_attn", "q k v"),
    "layers.linear_attn.elu_p1": lambda x: F.elu(x) + 1,
    "layers.delta_net.fused_recurrent_delta_rule": _delta_rule,
    "layers.gated_deltanet.chunk_gated_delta_rule": _gated_delta_rule,
    "layers.gated_deltanet.causal_conv1d": _causal_conv1d,
    "layers.based.parallel_based": _based,
    "layers.attn.flash_attn_func": flash_attn_func,
    "layers.nsa.parallel_nsa": later("ops.nsa.naive.naive_nsa"),
    "ops.nsa.naive.mean_pooling": _mean_pooling,
    "ops.nsa.naive.flash_attn_func": flash_attn_func,
    # MoBA's selection and merging of blocks are fla's. Only attention itself is replaced.
    "ops.moba.parallel.flash_attn_varlen_func": varlen_forward,
    "ops.moba.parallel._flash_attn_varlen_forward": varlen_forward,
    "ops.moba.parallel._flash_attn_varlen_backward": varlen_backward,
    "layers.rwkv6.token_shift": _shift,
    "layers.rwkv6.fused_recurrent_rwkv6": _wkv6,
    "layers.rwkv7.token_shift": _shift,
    "layers.rwkv7.chunk_rwkv7": _wkv7,
    "layers.rwkv7.fused_addcmul_rwkv7": later("ops.rwkv7.fused_addcmul.torch_addcmul_rwkv7"),
    "layers.rwkv7.fused_k_rwkv7": later("ops.rwkv7.fused_k_update.k_update_ref"),
    "layers.rwkv7.gate_output_correction": later("ops.rwkv7.gate_output_correction.gate_output_correction_ref"),
    # These two layers have plain forms, which only lack a plain SiLU.
    "layers.mamba.ACT2FN": {"silu": F.silu},
    "layers.mamba2.ACT2FN": {"silu": F.silu},
}
"""Replacements of Triton kernels and of flash-attn, by path in fla."""

IN_MODELS: dict[str, Any] = {
    "modules.mlp.swiglu_linear": lambda gate, x, weight, bias: F.linear(F.silu(gate) * x, weight, bias),
    "models.rwkv7.modeling_rwkv7.token_shift": _shift,
}
"""Replacements of kernels outside the layers, in whole models."""


def converted(mixer: Any) -> dict[str, Tensor]:
    """Weights of a mixer by the layer names used in a converted checkpoint."""
    (name,) = [name for name, entry in load_all().items() if entry.module is type(mixer)]
    sizes = mixer.config
    model = ModelConfig(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_query_groups,
        head_dim=sizes.kv_channels,
    )
    ours, theirs = dict(mixer.named_parameters()), {}
    families = [family for family in FAMILIES.values() if isinstance(family, OneMixerFamily)]
    (family,) = [family for family in families if family.mixer == name]
    for rule in family.mixer_rules(model, mixer.mixer_config):
        made = rule.to_theirs([ours.pop(name) for name in rule.ours])
        theirs.update(zip(rule.theirs, made, strict=True))
    assert not ours
    return theirs


def assert_close(found: Tensor, expected: Tensor, name: str = "output") -> None:
    """Compare within 1e-5 of the largest value, because fp32 sums have terms of that size."""
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 1e-5 * largest, f"{name} is off by {error} beside {largest}"


def assert_same_function(
    mixer: Any, layer: torch.nn.Module, weights: Mapping[str, Tensor], hidden_states: Tensor
) -> None:
    """Compare outputs, and the gradients of the input and of each of the mixer's parameters.

    Args:
        mixer: mixer of Selectron.
        layer: layer of fla.
        weights: all parameters of the layer by name, computed from those of the mixer.
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
