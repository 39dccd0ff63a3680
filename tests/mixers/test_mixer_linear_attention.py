"""Linear attention, RetNet, GLA and Based, from input to output, compared with float64 formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

MakeMixer = Callable[..., Any]


def _elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def _turned(x_td: Tensor, base: float) -> Tensor:
    half = x_td.shape[1] // 2
    angles = torch.arange(len(x_td))[:, None] / base ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x_td[:, :half], x_td[:, half:]) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag], 1)


def _head(mixer: Any, rows_tw: Tensor, keep: float, of_q_and_k: Callable[[Tensor], Tensor]) -> Tensor:
    """Output [t, dv] of one head: pair (t, s) has the weight keep**(t - s) times the product of query t and key s."""
    d, dv = mixer.head_dim, mixer.value_dim
    q, k, v, gate = rows_tw.split([d, d, dv, rows_tw.shape[1] - 2 * d - dv], 1)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    weights = (of_q_and_k(q) @ of_q_and_k(k).T / math.sqrt(d)) * torch.where(
        distance < 0, 0.0, keep ** distance.clamp(min=0).double()
    )
    out = weights @ v
    out = out / (out.square().mean(1, keepdim=True) + mixer.config.layernorm_epsilon).sqrt()
    out = out * mixer.norm_weight.double()
    return out * gate / (1 + (-gate).exp()) if mixer.mixer_config.output_gate else out


def _check(mixer: Any, hidden_states: Tensor, keep: list[float], of_q_and_k: Callable[[Tensor], Tensor]) -> None:
    rows = (hidden_states.double() @ mixer.in_proj.weight.double().T).view(13, 2, 4, -1)
    mixed = torch.stack(
        [torch.cat([_head(mixer, rows[:, b, h], keep[h], of_q_and_k) for h in range(4)], -1) for b in range(2)], 1
    )
    out, _ = mixer(hidden_states)
    torch.testing.assert_close(out.double(), mixed @ mixer.out_proj.weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("feature_map", "features"), [("elu", _elu_plus_one), ("relu", lambda x: x.clamp(min=0)), ("identity", lambda x: x)]
)
@pytest.mark.parametrize("fields", [{}, {"expand_v": 2, "output_gate": True}])
def test_linear_attention_equals_sum_over_pairs(
    make_mixer: MakeMixer,
    hidden_states: Tensor,
    feature_map: str,
    features: Callable[[Tensor], Tensor],
    fields: dict[str, Any],
) -> None:
    _check(make_mixer("linear_attention", feature_map=feature_map, **fields), hidden_states, [1.0] * 4, features)


@pytest.mark.parametrize("fields", [{}, {"expand_v": 1, "output_gate": False}])
def test_retnet_equals_decayed_sum_over_pairs(
    make_mixer: MakeMixer, hidden_states: Tensor, fields: dict[str, Any]
) -> None:
    mixer = make_mixer("retnet", **fields)
    keep = [1 - 2.0 ** (-5 - head) for head in range(4)]
    _check(mixer, hidden_states, keep, lambda x: _turned(x, mixer.config.rotary_base))


@pytest.mark.parametrize("fields", [{}, {"expand_v": 1, "output_gate": False, "decay_rank": 3, "decay_temperature": 2}])
def test_gla_equals_loop_over_tokens(make_mixer: MakeMixer, hidden_states: Tensor, fields: dict[str, Any]) -> None:
    mixer = make_mixer("gla", **fields)
    d, dv, hidden = mixer.head_dim, mixer.value_dim, hidden_states.double()
    rows = (hidden @ mixer.in_proj.weight.double().T).view(13, 2, 4, -1)
    low = hidden @ mixer.decay_down.double().T
    mixed = torch.empty(13, 2, 4, dv, dtype=torch.float64)
    for b in range(2):
        for head in range(4):
            state = torch.zeros(d, dv, dtype=torch.float64)
            for t in range(13):
                q, k, v, gate = rows[t, b, head].split([d, d, dv, dv if mixer.mixer_config.output_gate else 0])
                logits = mixer.decay_up[head].double() @ low[t, b] + mixer.decay_bias[head].double()
                keep = (1 / (1 + (-logits).exp())) ** (1 / mixer.mixer_config.decay_temperature)
                state = keep[:, None] * state + torch.outer(k, v)
                out = q @ state / math.sqrt(d)
                out = out / (out.square().mean() + mixer.config.layernorm_epsilon).sqrt() * mixer.norm_weight.double()
                mixed[t, b, head] = out * gate / (1 + (-gate).exp()) if len(gate) else out
    out, _ = mixer(hidden_states)
    torch.testing.assert_close(out.double(), mixed.flatten(2) @ mixer.out_proj.weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 5])
def test_based_equals_taylor_attention(make_mixer: MakeMixer, hidden_states: Tensor, width: int) -> None:
    mixer = make_mixer("based", feature_dim=width)
    rows = (hidden_states.double() @ mixer.in_proj.weight.double().T).view(13, 2, 4, -1)
    q, k, v = rows.split([width, width, 6], -1)
    scores = torch.einsum("tbhf,sbhf->bhts", q, k) / math.sqrt(width)
    weights = (1 + scores + scores**2 / 2).tril()
    mixed = torch.einsum("bhts,sbhd->tbhd", weights / weights.sum(-1, keepdim=True), v)
    out, _ = mixer(hidden_states)
    torch.testing.assert_close(out.double(), mixed.flatten(2) @ mixer.out_proj.weight.double().T, rtol=1e-4, atol=1e-5)
