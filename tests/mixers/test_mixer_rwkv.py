"""RWKV-6 and RWKV-7 from input to output, compared with flash-linear-attention's layers with plain torch ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_fla import PLAIN, assert_same_function, converted, fla, replace
from torch import Tensor

from kernels.rwkv7 import rwkv7
from megatron_ext.mixers import rwkv7 as rwkv7_module
from megatron_ext.mixers.rwkv7 import default_rank
from megatron_ext.parallel.parameters import generator_for

MakeMixer = Callable[..., Any]
HIDDEN, HEADS, HEAD_DIM = 24, 4, 6


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.nn.Module]:
    """Function that builds fla's layer on the CPU, with Triton kernels replaced by fla's references or a loop."""

    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    replace(monkeypatch, PLAIN)

    def make(name: str, layer_idx: int = 0, layers: int = 2, hidden: int = HIDDEN) -> torch.nn.Module:
        sizes = {"hidden_size": hidden, "num_heads": HEADS, "layer_idx": layer_idx}
        if name == "rwkv7":
            return fla("layers.rwkv7.RWKV7Attention")(head_dim=None, num_hidden_layers=layers, **sizes)
        layer = fla("layers.rwkv6.RWKV6Attention")(expand_k=1.0, **sizes)
        layer.g_norm, layer.gate_fn = _GroupNorm(HEADS, HIDDEN, eps=1e-5 * HEAD_DIM), torch.nn.functional.silu
        return layer

    return make


class _GroupNorm(torch.nn.GroupNorm):
    """Group norm of torch over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view(x.shape)


def _rwkv6_weights(mixer: Any) -> dict[str, Tensor]:
    """Weights of the mixer by fla's names. fla orders mixtures as r, w, k, v, g."""
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


WEIGHTS = {"rwkv6": _rwkv6_weights, "rwkv7": converted}


@pytest.mark.parametrize("name", WEIGHTS)
def test_outputs_and_gradients_equal_fla(make_mixer: MakeMixer, theirs: Any, hidden_states: Tensor, name: str) -> None:
    mixer, layer = make_mixer(name), theirs(name)
    with torch.no_grad():  # small weights do not amplify rounding errors in decay logits
        for parameter in mixer.parameters():
            parameter.mul_(0.5)
    assert_same_function(mixer, layer, WEIGHTS[name](mixer), hidden_states)


def _begin(mixer: Any) -> Any:
    """Reset the mixer to its own initial values."""
    for name, parameter in mixer.named_parameters(recurse=False):
        parameter.data = torch.empty(parameter.shape)
        parameter.initializer(parameter.data, generator_for(1, name))
    return mixer


@pytest.mark.parametrize(("layer_idx", "layers"), [(0, 2), (1, 2), (3, 12), (11, 12)])
def test_rwkv7_initialization_equals_fla(make_mixer: MakeMixer, theirs: Any, layer_idx: int, layers: int) -> None:
    mixer = _begin(make_mixer("rwkv7", layer_number=layer_idx + 1, layers=layers))
    expected = dict(theirs("rwkv7", layer_idx, layers).named_parameters())
    for name, found in converted(mixer).items():
        if name.endswith("_proj.weight"):
            continue  # our matrices are normal, as everywhere in the model
        if name.endswith("lora.2.weight"):
            assert float(found.std()) == pytest.approx(float(expected[name].std()), rel=0.15), name
        else:
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("hidden", [24, 768])
def test_rwkv7_ranks_equal_fla(theirs: Any, hidden: int) -> None:
    layer = theirs("rwkv7", hidden=hidden)
    found = [default_rank(2.5 * hidden / HEADS / 64, hidden), default_rank(5, hidden)]
    assert found == [layer.decay_low_rank_dim, layer.gate_low_rank_dim]
    assert layer.a_low_rank_dim == layer.decay_low_rank_dim


@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 12), (5, 12), (11, 12)])
def test_rwkv6_initialization(make_mixer: MakeMixer, layer: int, layers: int) -> None:
    """Compare initial values channel by channel with RWKV-LM's RWKV_Tmix_x060."""
    mixer = _begin(make_mixer("rwkv6", layer_number=layer + 1, layers=layers))
    ratio, left = layer / max(layers - 1, 1), 1 - layer / layers
    for n in range(HIDDEN):
        plain, steep = 1 - (n / HIDDEN) ** left, 1 - (n / HIDDEN) ** (0.5 * left)
        decay = -6 + 5 * (n / (HIDDEN - 1)) ** (0.7 + 1.3 * ratio)
        bonus = ratio * (1 - n / (HIDDEN - 1)) + ((n + 1) % 3 - 1) * 0.1
        found = [mixer.mu_of_mixing[n], *mixer.mu[:, n], mixer.decay_base.flatten()[n], mixer.bonus.flatten()[n]]
        expected = [plain, plain, plain, plain - 0.3 * ratio, steep, steep, decay, bonus]
        assert [float(x) for x in found] == pytest.approx(expected, abs=1e-5)
    assert mixer.group_norm_weight.unique().tolist() == pytest.approx([((layer + 1) / layers) ** 0.7])
    assert float(mixer.mix_up.abs().max()) <= 0.01
    assert not mixer.mix_down.any()
    assert not mixer.decay_down.any()


def test_rwkv7_log_decay_bound(make_mixer: MakeMixer, hidden_states: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    mixer, seen = make_mixer("rwkv7"), []

    def op(r: Tensor, k: Tensor, v: Tensor, g: Tensor, *more: Tensor, log_decay_bound: float, **options: Any) -> Any:
        seen.append((float(g.min()), log_decay_bound))
        return rwkv7(r, k, v, g, *more, **options)

    with torch.no_grad():
        mixer.decay_base.copy_(torch.linspace(-300, 300, mixer.decay_base.numel()).view_as(mixer.decay_base))
    monkeypatch.setattr(rwkv7_module, "rwkv7", op)
    mixer(hidden_states)
    ((least, bound),) = seen
    assert bound == pytest.approx(least, abs=1e-6)
    assert fla("ops.generalized_delta_rule.dplr.chunk.gate_bound_is_safe")(bound, 64)


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_weight_decay_on_vectors(make_mixer: MakeMixer, name: str) -> None:
    mixer = make_mixer(name)
    undecayed = {n for n, p in mixer.named_parameters(recurse=False) if p.no_weight_decay}
    of_heads = {"bonus", "decay_base", "group_norm_weight", "group_norm_bias", "mu"}
    own = {"rwkv6": {"mu_of_mixing"}, "rwkv7": {"rate_base", "removal_scale", "key_rate"}}
    assert undecayed == of_heads | own[name]
