"""Mamba-2 from input to output, compared with a float64 loop over tokens and with Mamba-2 of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mixers.core.base import MixInput
from megatron_ext.parallel.parameters import uniform_within

MakeMixer = Callable[..., Any]
LENGTH, BATCH, HIDDEN, HEADS, STATE = 13, 2, 24, 4, 5


@pytest.fixture
def make(make_mixer: MakeMixer) -> MakeMixer:
    def small(groups: int = 2, **fields: Any) -> Any:
        return make_mixer("mamba2", groups=groups, **{"state_size": STATE, **fields})

    return small


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _rows(mixer: Any, hidden_states: Tensor) -> Tensor:
    """Projection [t, b, groups, width] in float64."""
    projected = hidden_states.double() @ mixer.in_proj.weight.double().T
    return projected.view(LENGTH, BATCH, mixer.num_head_groups(), -1)


def _features(mixer: Any, rows_tw: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the rows of a group into x [t, heads, d], B and C [t, n] after the convolution, and the remaining rows."""
    heads = HEADS // mixer.num_head_groups()
    inner = heads * mixer.head_dim * mixer.mixer_config.expand
    mixed = rows_tw[:, : inner + 2 * STATE]
    if mixer.mixer_config.convolution:
        taps, bias = mixer.conv_weight[group].double(), mixer.conv_bias[group].double()
        zeros = torch.zeros(taps.shape[1] - 1, mixed.shape[1], dtype=torch.float64)
        windows = torch.cat([zeros, mixed]).unfold(0, taps.shape[1], 1)
        mixed = (windows * taps).sum(-1) + bias
    x, b, c = _silu(mixed).split([inner, STATE, STATE], 1)
    return x.view(LENGTH, heads, -1), b, c, rows_tw[:, inner + 2 * STATE :]


def _gate_and_norm(mixer: Any, y_tw: Tensor, gate_tw: Tensor, group: int) -> Tensor:
    y = y_tw * _silu(gate_tw)
    if mixer.mixer_config.group_norm:
        y = y / (y.square().mean(1, keepdim=True) + mixer.config.layernorm_epsilon).sqrt()
        y = y * mixer.group_norm_weight[group].double()
    return y


def _group_by_loop(mixer: Any, rows_tw: Tensor, group: int) -> Tensor:
    """Output [t, heads * d] of one group, by a loop over tokens."""
    x, b, c, rest = _features(mixer, rows_tw, group)
    kind, heads, inner = mixer.mixer_config.decay, x.shape[1], x[0].numel()
    y = torch.zeros_like(x)
    for head in range(heads):
        state = torch.zeros(x.shape[2], STATE, dtype=torch.float64)
        for t in range(LENGTH):
            step, kept = 1.0, 1.0
            if kind != "none":
                raw = rest[t, inner + head].item() if kind == "data_dependent" else 0.0
                step = math.log1p(math.exp(raw + mixer.step_bias[group, head].item()))
                kept = math.exp(-math.exp(mixer.log_decay[group, head].item()) * step)
            # In the paper's notation h_t = A_t h_{t-1} + B_t x_t and y_t = C_t h_t + D x_t.
            state = kept * state + step * torch.outer(x[t, head], b[t])
            y[t, head] = state @ c[t] + mixer.skip[group, head].item() * x[t, head]
    return _gate_and_norm(mixer, y.flatten(1), rest[:, :inner], group)


def _output(mixer: Any, hidden_states: Tensor, of_group: Callable[[Any, Tensor, int], Tensor]) -> Tensor:
    """Output of the layer from those of its groups, in float64."""
    rows = _rows(mixer, hidden_states)
    mixed = torch.stack(
        [
            torch.cat([of_group(mixer, rows[:, b, u], u) for u in range(mixer.num_head_groups())], 1)
            for b in range(BATCH)
        ],
        1,
    )
    return mixed @ mixer.out_proj.weight.double().T


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"expand": 1},
        {"conv_kernel_size": 2},
        {"convolution": False},
        {"decay": "fixed"},
        {"decay": "none"},
        {"group_norm": False},
        {"expand": 1, "convolution": False, "decay": "none", "group_norm": False},
    ],
)
def test_equals_loop_over_tokens(make: MakeMixer, hidden_states: Tensor, groups: int, fields: dict[str, Any]) -> None:
    mixer = make(groups, **fields)
    out, _ = mixer(hidden_states)
    torch.testing.assert_close(out.double(), _output(mixer, hidden_states, _group_by_loop), rtol=1e-4, atol=1e-4)


def _in_their_order(mixer: Any, in_proj: Tensor) -> Tensor:
    """Projection rows of a one-group mixer in the order of transformers: [z | x | B | C | step]."""
    xbc, z, step = in_proj.split([mixer.conv_width, mixer.output_width(), HEADS])
    return torch.cat([z, xbc, step])


def _pairs(mixer: Any, theirs: Any, of: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of `of` applied to our weight in the layout of transformers, and to their weight."""
    return {
        "in_proj": (_in_their_order(mixer, of(mixer.in_proj.weight)), of(theirs.in_proj.weight)),
        "conv_weight": (of(mixer.conv_weight).transpose(0, 1), of(theirs.conv1d.weight)),
        "conv_bias": (of(mixer.conv_bias).flatten(), of(theirs.conv1d.bias)),
        "log_decay": (of(mixer.log_decay).flatten(), of(theirs.A_log)),
        "step_bias": (of(mixer.step_bias).flatten(), of(theirs.dt_bias)),
        "skip": (of(mixer.skip).flatten(), of(theirs.D)),
        "group_norm_weight": (of(mixer.group_norm_weight).flatten(), of(theirs.norm.weight)),
        "out_proj": (of(mixer.out_proj.weight), of(theirs.out_proj.weight)),
    }


@pytest.mark.parametrize("expand", [1, 2])
def test_equals_mamba2_of_transformers(make: MakeMixer, hidden_states: Tensor, expand: int) -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2", exc_type=ImportError)
    mixer = make(1, expand=expand)
    config = modeling.Mamba2Config(
        num_heads=HEADS,
        head_dim=mixer.value_dim,
        hidden_size=HIDDEN,
        state_size=STATE,
        expand=expand,
        n_groups=1,
        conv_kernel=4,
        num_hidden_layers=1,
        layer_norm_epsilon=mixer.config.layernorm_epsilon,
        time_step_limit=(0.0, float("inf")),
        chunk_size=4,
    )
    theirs = modeling.Mamba2Mixer(config, layer_idx=0).eval()
    pairs = _pairs(mixer, theirs, lambda weight: weight.data)
    assert len(pairs) == len(list(mixer.parameters())) == len(list(theirs.parameters()))
    for ours, their in pairs.values():
        their.copy_(ours)
    x, y = (hidden_states.clone().requires_grad_() for _ in range(2))
    out, expected = mixer(x)[0], theirs(y.transpose(0, 1)).transpose(0, 1)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(upstream)
    expected.backward(upstream)
    gradients: dict[str, Any] = _pairs(mixer, theirs, lambda weight: weight.grad)  # type: ignore[arg-type,return-value]
    for name, (ours, their) in {"output": (out, expected), "input": (x.grad, y.grad), **gradients}.items():
        # Gradients are as large as 100, so the fp32 tolerance scales with the largest.
        largest = their.abs().max().item()
        assert largest > 1.0, name
        assert (ours - their).abs().max().item() < 1e-5 * largest, name


def _group_by_pairs(mixer: Any, rows_tw: Tensor, group: int) -> Tensor:
    """Output of one group without decay: pair (t, s) has the weight C_t . B_s in every head of the group."""
    x, b, c, gate = _features(mixer, rows_tw, group)
    y = torch.einsum("ts,shd->thd", (c @ b.T).tril(), x) + mixer.skip[group].double()[:, None] * x
    return _gate_and_norm(mixer, y.flatten(1), gate, group)


def test_without_decay_equals_sum_over_pairs(make: MakeMixer, hidden_states: Tensor) -> None:
    mixer = make(decay="none")
    out, _ = mixer(hidden_states)
    torch.testing.assert_close(out.double(), _output(mixer, hidden_states, _group_by_pairs), rtol=1e-4, atol=1e-4)


def _copy(source: Any, target: Any) -> None:
    """Copy all weights that both have, except the input projection."""
    own = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if name in own and name != "in_proj.weight":
            parameter.data.copy_(own[name])


def test_fixed_decay(make: MakeMixer, hidden_states: Tensor) -> None:
    free, fixed = make(), make(decay="fixed")
    _copy(free, fixed)
    rows = free.in_proj.weight.data.view(2, -1, HIDDEN)
    fixed.in_proj.weight.data.copy_(rows[:, :-2].flatten(0, 1))
    assert not torch.allclose(free(hidden_states)[0], fixed(hidden_states)[0], atol=1e-2)
    rows[:, -2:] = 0.0
    torch.testing.assert_close(free(hidden_states)[0], fixed(hidden_states)[0], rtol=1e-5, atol=1e-5)


def test_without_convolution(make: MakeMixer, hidden_states: Tensor) -> None:
    without, one = make(convolution=False), make(conv_kernel_size=1)
    _copy(without, one)
    one.in_proj.weight.data.copy_(without.in_proj.weight)
    one.conv_weight.data.fill_(1.0)
    one.conv_bias.data.zero_()
    torch.testing.assert_close(without(hidden_states)[0], one(hidden_states)[0], rtol=1e-5, atol=1e-5)


def test_without_group_norm(make: MakeMixer) -> None:
    with_norm, without = make(), make(group_norm=False)
    _copy(with_norm, without)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(LENGTH, BATCH, 2, without.head_group_width(), generator=generator)
    plain = without.mix(x, MixInput(0, 2)).double()
    norm = (plain.square().mean(-1, keepdim=True) + with_norm.config.layernorm_epsilon).sqrt()
    expected = plain / norm * with_norm.group_norm_weight.double()
    torch.testing.assert_close(with_norm.mix(x, MixInput(0, 2)).double(), expected, rtol=1e-5, atol=1e-5)


CONVOLUTION, STEP = {"conv_weight", "conv_bias"}, {"log_decay", "step_bias"}


@pytest.mark.parametrize(
    ("fields", "left_out", "steps"),
    [
        ({}, set(), 2),
        ({"convolution": False}, CONVOLUTION, 2),
        ({"decay": "fixed"}, set(), 0),
        ({"decay": "none"}, STEP, 0),
        ({"group_norm": False}, {"group_norm_weight"}, 2),
    ],
)
def test_only_used_parameters_exist(make: MakeMixer, fields: dict[str, Any], left_out: set[str], steps: int) -> None:
    mixer = make(**fields)
    names = {"in_proj.weight", "out_proj.weight", "skip", "group_norm_weight"} | CONVOLUTION | STEP
    assert {name for name, _ in mixer.named_parameters()} == names - left_out
    inner = 2 * 6 * 2
    assert mixer.in_proj.weight.shape == (2 * (2 * inner + 2 * STATE + steps), HIDDEN)
    assert mixer.out_proj.weight.shape == (HIDDEN, 2 * inner)


def test_groups_are_independent(make: MakeMixer) -> None:
    """A group alone gives its part of the whole output, so groups can be split over ranks."""
    mixer = make()
    x = torch.randn(LENGTH, BATCH, 2, mixer.head_group_width(), generator=torch.Generator().manual_seed(5))
    whole = mixer.mix(x, MixInput(0, 2))
    for u in range(2):
        torch.testing.assert_close(mixer.mix(x[:, :, u : u + 1], MixInput(u, 1)), whole[:, :, u : u + 1])


def test_outputs_keep_16_bit_dtype(make: MakeMixer) -> None:
    mixer = make()
    x = torch.randn(LENGTH, BATCH, 2, mixer.head_group_width(), generator=torch.Generator().manual_seed(5))
    expected = mixer.mix(x, MixInput(0, 2))
    out = mixer.bfloat16().mix(x.bfloat16(), MixInput(0, 2))
    assert out.dtype == torch.bfloat16
    assert ((out.float() - expected).norm() / expected.norm()).item() < 0.03


def test_convolution_bias_initialization() -> None:
    whole = torch.empty(50, 40)
    uniform_within(0.5)(whole, torch.Generator().manual_seed(1))
    assert float(whole.abs().max()) <= 0.5
    assert float(whole.std()) == pytest.approx(1 / math.sqrt(12), rel=0.05)
    assert abs(float(whole.mean())) < 0.03


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("expand", [1, 2])
def test_operations(make: MakeMixer, groups: int, expand: int) -> None:
    """Count a write and a read of the state."""
    for length in (12, 120):
        assert make(groups, expand=expand).mixing_flops(length) == pytest.approx(HEADS * 2 * 2 * STATE * 6 * expand)
