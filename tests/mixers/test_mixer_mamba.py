"""Mamba from input to output, compared with a float64 loop over tokens and with Mamba of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mixers import mamba
from megatron_ext.mixers.core.base import MixInput

MakeMixer = Callable[..., Any]
LENGTH, BATCH, HIDDEN, HEADS, STATE, HEAD_DIM = 13, 2, 24, 4, 5, 6


@pytest.fixture
def make(make_mixer: MakeMixer) -> MakeMixer:
    return lambda **fields: make_mixer("mamba", **{"state_size": STATE, **fields})


def _assert_close(found: Tensor, expected: Tensor, name: str = "output") -> None:
    """Compare within 1e-5 of the largest value, because fp32 sums have terms of that size."""
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 1e-5 * largest, f"{name} is off by {error} beside {largest}"


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _x_and_gate(mixer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and z [t, b, channels] in float64."""
    projected = hidden_states.double() @ mixer.in_proj.weight.double().T
    rows = projected.view(LENGTH, BATCH, HEADS, 2, -1)
    return rows[..., 0, :].flatten(2), rows[..., 1, :].flatten(2)


def _by_loop(mixer: Any, hidden_states: Tensor) -> Tensor:
    """Output of the layer in float64, by a loop over tokens with all channels at once."""
    weights = {name: p.detach().double() for name, p in mixer.named_parameters()}
    flat = {name: weights[name].flatten(0, 1) for name in ("conv_weight", "conv_bias", "dt_proj", "dt_bias")}
    A, skip = -weights["A_log"].flatten(0, 1).exp(), weights["D"].flatten()
    down = torch.cat(list(weights["x_proj"]), dim=1)
    rank, kernel = flat["dt_proj"].shape[1], flat["conv_weight"].shape[1]
    x_in, z = _x_and_gate(mixer, hidden_states)
    y = torch.zeros_like(z)
    for b in range(BATCH):
        h = torch.zeros_like(A)
        for t in range(LENGTH):
            mixed = flat["conv_bias"].clone()
            for back in range(min(kernel, t + 1)):
                mixed += flat["conv_weight"][:, kernel - 1 - back] * x_in[t - back, b]
            x = _silu(mixed)
            low, write, read = (down @ x).split([rank, STATE, STATE])
            dt = (flat["dt_proj"] @ low + flat["dt_bias"]).exp().log1p()
            # In the paper's notation h_t = exp(dt A) h_{t-1} + dt B x and y = C h + D x.
            h = (dt[:, None] * A).exp() * h + torch.outer(dt * x, write)
            y[t, b] = (h @ read + skip * x) * _silu(z[t, b])
    return y @ weights["out_proj.weight"].T


@pytest.mark.parametrize(
    "fields", [{}, {"expand": 1}, {"conv_kernel_size": 1}, {"dt_rank": 5}, {"conv_kernel_size": 20, "expand": 3}]
)
def test_equals_loop_over_tokens(make: MakeMixer, hidden_states: Tensor, fields: dict[str, Any]) -> None:
    mixer = make(**fields)
    _assert_close(mixer(hidden_states)[0].double(), _by_loop(mixer, hidden_states))


def _weights_of_transformers(mixer: Any) -> dict[str, Tensor]:
    """Weights of transformers' Mamba from those of the mixer: x channels of all heads, then z channels of all heads."""
    in_proj = mixer.in_proj.weight.view(HEADS, 2, -1, HIDDEN)
    return {
        "in_proj.weight": in_proj.transpose(0, 1).reshape(-1, HIDDEN),
        "conv1d.weight": mixer.conv_weight.flatten(0, 1)[:, None],
        "conv1d.bias": mixer.conv_bias.flatten(),
        "x_proj.weight": mixer.x_proj.transpose(0, 1).flatten(1),
        "dt_proj.weight": mixer.dt_proj.flatten(0, 1),
        "dt_proj.bias": mixer.dt_bias.flatten(),
        "A_log": mixer.A_log.flatten(0, 1),
        "D": mixer.D.flatten(),
        "out_proj.weight": mixer.out_proj.weight,
    }


@pytest.mark.parametrize(("expand", "rank"), [(2, None), (1, 3)])
def test_equals_mamba_of_transformers(make: MakeMixer, hidden_states: Tensor, expand: int, rank: int | None) -> None:
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba", exc_type=ImportError)
    mixer = make(expand=expand, dt_rank=rank)
    config = modeling.MambaConfig(
        hidden_size=HIDDEN,
        state_size=STATE,
        expand=expand,
        conv_kernel=4,
        time_step_rank=rank or math.ceil(HIDDEN / 16),
        num_hidden_layers=1,
    )
    theirs = modeling.MambaMixer(config, layer_idx=0)
    weights = _weights_of_transformers(mixer)
    assert {name: p.shape for name, p in theirs.named_parameters()} == {name: w.shape for name, w in weights.items()}
    x = hidden_states.clone().requires_grad_()
    leaves = {"input": x, **dict(mixer.named_parameters())}
    found = mixer(x)[0]
    expected = torch.func.functional_call(theirs, weights, (x.transpose(0, 1),)).transpose(0, 1)
    _assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)) / found.numel() ** 0.5
    found_grads = torch.autograd.grad(found, list(leaves.values()), upstream)
    expected_grads = torch.autograd.grad(expected, list(leaves.values()), upstream)
    for name, a, b in zip(leaves, found_grads, expected_grads, strict=True):
        _assert_close(a, b, name)


def test_partial_projections_are_summed_over_ranks(
    make: MakeMixer, hidden_states: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the sum over ranks, a rank's shard of the heads gives its part of the whole output."""
    mixer = make()
    rows = mixer.in_proj(hidden_states)[0].view(LENGTH, BATCH, HEADS, -1)
    calls: list[tuple[Tensor, Any]] = []

    def record(x: Tensor, group: Any) -> Tensor:
        calls.append((x, group))
        return x

    monkeypatch.setattr(mamba, "sum_over_ranks", record)
    whole = mixer.mix(rows, MixInput(0, HEADS))
    assert [group for _, group in calls] == [mixer.tp_group]
    calls.clear()
    parts = [MixInput(0, 1), MixInput(1, 3)]
    for part in parts:
        mixer.mix(rows[:, :, part.first_head_group :][:, :, : part.num_head_groups], part)
    assert [group for _, group in calls] == [mixer.tp_group, mixer.cp_group] * 2
    total = calls[1][0] + calls[3][0]
    monkeypatch.setattr(mamba, "sum_over_ranks", lambda x, group: total if group is mixer.cp_group else x)
    of_parts = [mixer.mix(rows[:, :, part.first_head_group :][:, :, : part.num_head_groups], part) for part in parts]
    _assert_close(torch.cat(of_parts, 2), whole)


@pytest.mark.parametrize(("expand", "state"), [(2, 16), (1, 3)])
def test_mamba_flops(make: MakeMixer, expand: int, state: int) -> None:
    """Count decay, write and read of each element of a channel's state."""
    mixer = make(expand=expand, state_size=state)
    assert mixer.mixing_flops(12) == pytest.approx(HEADS * HEAD_DIM * expand * state * 3 * 2)
    assert mixer.mixing_flops(1200) == mixer.mixing_flops(12)


def test_initialization(make: MakeMixer) -> None:
    mixer = make(state_size=3, dt_rank=4, conv_kernel_size=9)
    start = {}
    for name, parameter in mixer.named_parameters(recurse=False):
        assert parameter.partition_dim == 0
        start[name] = torch.empty(256, *parameter.shape[1:])
        parameter.initializer(start[name], torch.Generator().manual_seed(1))
    torch.testing.assert_close(start["A_log"].exp(), torch.tensor([1.0, 2.0, 3.0]).expand_as(start["A_log"]))
    assert (start["D"] == 1).all()
    steps = torch.nn.functional.softplus(start["dt_bias"].double())
    assert 0.00099 < float(steps.min()) < 0.0011 < 0.09 < float(steps.max()) < 0.101
    for name, bound in (("conv_weight", 1 / 3), ("conv_bias", 1 / 3), ("dt_proj", 1 / 2)):
        assert 0.95 * bound < float(start[name].max()) <= bound
        assert -bound <= float(start[name].min()) < -0.95 * bound
    undecayed = {n for n, p in mixer.named_parameters(recurse=False) if getattr(p, "no_weight_decay", False)}
    assert undecayed == {"conv_bias", "dt_bias", "A_log", "D"}
    assert float(start["x_proj"].std()) == pytest.approx(mixer.config.init_method_std, rel=0.05)
