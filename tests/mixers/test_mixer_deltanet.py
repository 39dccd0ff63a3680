"""DeltaNet and gated DeltaNet from input to output, compared with a float64 loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

MakeMixer = Callable[..., Any]


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _head(mixer: Any, rows_tw: Tensor, head: int, gated: bool) -> Tensor:
    """Output [t, dv] of one head from its rows of the projection."""
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
        # S_t = S_{t-1} alpha (1 - beta k k^T) + beta v k^T in the paper's notation, here transposed.
        state = alpha * (state - beta * torch.outer(k, k @ state)) + beta * torch.outer(k, v)
        out = q @ state
        out = out / (out.square().mean() + mixer.config.layernorm_epsilon).sqrt() * mixer.norm_weight.double()
        outputs.append(out * _silu(rows_tw[t, 2 * d + dv : gate_end]) if gated else out)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
@pytest.mark.parametrize(
    "fields", [{}, {"expand_v": 2}, {"output_gate": False}, {"output_gate": True}, {"conv_kernel_size": 1}]
)
def test_equals_loop_over_tokens(
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
