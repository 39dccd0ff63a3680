"""DeltaNet, gated and not, from its input to its output, against a loop over tokens in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mixers.convolution import causal_convolution
from megatron_ext.mixers.past import BEGINNING

MakeMixer = Callable[..., Any]


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _head(mixer: Any, rows_tw: Tensor, head: int, gated: bool) -> Tensor:
    """One head's output [t, dv] from its rows of the projection."""
    d, dv = mixer.head_dim, mixer.value_dim
    taps = mixer.conv_weight[head].double()
    gate_end = 2 * d + dv + (dv if gated else 0)
    state = torch.zeros(d, dv, dtype=torch.float64)
    outputs = []
    for t in range(len(rows_tw)):
        mixed = torch.zeros(2 * d + dv, dtype=torch.float64)
        for back in range(taps.shape[1]):
            if t >= back:
                mixed += taps[:, -1 - back] * rows_tw[t - back, : 2 * d + dv]
        q, k, v = _silu(mixed).split([d, d, dv])
        q, k = q / q.norm() / math.sqrt(d), k / k.norm()
        beta = 1 / (1 + math.exp(-rows_tw[t, gate_end]))
        alpha = 1.0
        if hasattr(mixer, "log_decay"):
            decay, bias = float(mixer.log_decay[head].double().exp()), float(mixer.step_bias[head])
            alpha = math.exp(-decay * math.log1p(math.exp(float(rows_tw[t, gate_end + 1]) + bias)))
        # S_t = S_{t-1} alpha (1 - beta k k^T) + beta v k^T, in the paper's words, here transposed.
        state = alpha * (state - beta * torch.outer(k, k @ state)) + beta * torch.outer(k, v)
        out = q @ state
        out = out / (out.square().mean() + mixer.config.layernorm_epsilon).sqrt() * mixer.norm_weight.double()
        outputs.append(out * _silu(rows_tw[t, 2 * d + dv : gate_end]) if gated else out)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
@pytest.mark.parametrize(
    "fields", [{}, {"expand_v": 2}, {"output_gate": False}, {"output_gate": True}, {"conv_kernel_size": 1}]
)
def test_it_is_the_loop_over_tokens(
    make_mixer: MakeMixer, hidden_states: Tensor, name: str, fields: dict[str, Any]
) -> None:
    mixer = make_mixer(name, **fields)
    rows = (hidden_states.double() @ mixer.in_proj.weight.double().T).view(13, 2, 4, -1)
    gated = fields.get("output_gate", name == "gated_deltanet")
    mixed = torch.stack(
        [torch.cat([_head(mixer, rows[:, b, head], head, gated) for head in range(4)], -1) for b in range(2)], 1
    )
    out, _ = mixer(hidden_states)
    torch.testing.assert_close(out.double(), mixed @ mixer.out_proj.weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_the_convolution_is_torchs(kernel: int, length: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(length, 2, 3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(3, 5, kernel, dtype=torch.float64, generator=generator, requires_grad=True)
    channels = x.permute(1, 2, 3, 0).reshape(2, 15, length)
    padded = torch.nn.functional.pad(channels, (kernel - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight.reshape(15, 1, kernel), groups=15)
    expected = expected.view(2, 3, 5, length).permute(3, 0, 1, 2)
    found = causal_convolution(x, weight, BEGINNING)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    for a, b in zip(
        torch.autograd.grad(found, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
