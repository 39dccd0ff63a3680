"""Attention mixer, compared with float64 loops over heads and positions and complex rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mixers.core.base import MixInput

MakeMixer = Callable[..., Any]


def _per_group(mixer: Any, x_tbh: Tensor) -> Tensor:
    """Projections [t, b, group, parts, d] in float64."""
    projected = x_tbh.double() @ mixer.in_proj.weight.double().T
    return projected.view(*x_tbh.shape[:2], mixer.config.num_query_groups, -1, mixer.head_dim)


def _turned(vector: Tensor, position: int, base: float = 10000.0) -> Tensor:
    """Rotate a head's vector, whose halves are the real and imaginary parts of d/2 numbers with separate angles."""
    half = len(vector) // 2
    numbers = torch.complex(vector[:half], vector[half:])
    angles = torch.tensor([position * base ** (-2 * i / len(vector)) for i in range(half)], dtype=torch.float64)
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def _attention(
    mixer: Any,
    x_tbh: Tensor,
    *,
    rotary: bool = True,
    window: int | None = None,
    temperature: float = 1.0,
    slopes: list[float] | None = None,
    keys: Callable[[int, int], Tensor] | None = None,
) -> Tensor:
    rows = _per_group(mixer, x_tbh)
    length, batch, groups, parts, d = rows.shape
    queries = parts - (1 if keys else 2)
    out = torch.zeros(length, batch, groups * queries * d, dtype=torch.float64)
    for b in range(batch):
        for head in range(groups * queries):
            group, own = divmod(head, queries)
            for t in range(length):
                seen = range(max(0, t - window + 1) if window else 0, t + 1)
                scores = []
                for s in seen:
                    q, k = rows[t, b, group, own], keys(s, group) if keys else rows[s, b, group, queries]
                    if rotary:
                        q, k = _turned(q, t), _turned(k, s)
                    bias = slopes[head] * (t - s) if slopes else 0.0
                    scores.append(float(q @ k) / math.sqrt(d) / temperature - bias)
                weights = [math.exp(score - max(scores)) for score in scores]
                mixed = sum(w / sum(weights) * rows[s, b, group, -1] for w, s in zip(weights, seen, strict=True))
                out[t, b, head * d : (head + 1) * d] = mixed
    return out @ mixer.out_proj.weight.double().T


def _check(mixer: Any, x: Tensor, expected: Tensor) -> None:
    out, bias = mixer(x)
    assert bias is None
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_rotary_attention_with_query_groups(make_mixer: MakeMixer, hidden_states: Tensor, groups: int) -> None:
    mixer = make_mixer("attention", groups=groups)
    _check(mixer, hidden_states, _attention(mixer, hidden_states))


@pytest.mark.parametrize("window", [1, 4, 13, 50])
def test_sliding_window(make_mixer: MakeMixer, hidden_states: Tensor, window: int) -> None:
    mixer = make_mixer("attention", window=window)
    _check(mixer, hidden_states, _attention(mixer, hidden_states, window=window))


def test_temperature(make_mixer: MakeMixer, hidden_states: Tensor) -> None:
    mixer = make_mixer("attention", temperature=0.25)
    _check(mixer, hidden_states, _attention(mixer, hidden_states, temperature=0.25))


@pytest.mark.parametrize("encoding", ["none", "learned"])
def test_without_position_encoding(make_mixer: MakeMixer, hidden_states: Tensor, encoding: str) -> None:
    """Learned positions are added at the model's input. The mixer itself then has no position encoding."""
    mixer = make_mixer("attention", position_encoding=encoding)
    _check(mixer, hidden_states, _attention(mixer, hidden_states, rotary=False))


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_temperature_does_not_scale_alibi(
    make_mixer: MakeMixer, hidden_states: Tensor, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ext.mixers import attention

    chosen = partial(attention.softmax_attention, implementation=implementation)
    monkeypatch.setattr(attention, "softmax_attention", chosen)
    mixer = make_mixer("attention", heads=4, groups=2, position_encoding="alibi", temperature=0.25)
    slopes = [2.0 ** (-2 * i) for i in range(1, 5)]
    expected = _attention(mixer, hidden_states, rotary=False, temperature=0.25, slopes=slopes)
    _check(mixer, hidden_states, expected)
    divided = _attention(mixer, hidden_states, rotary=False, temperature=0.25, slopes=[4 * x for x in slopes])
    assert float((expected - divided).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [(4, [0.25, 0.0625, 0.015625, 0.00390625]), (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])],
)
def test_alibi(make_mixer: MakeMixer, hidden_states: Tensor, heads: int, slopes: list[float]) -> None:
    mixer = make_mixer("attention", heads=heads, groups=2, position_encoding="alibi")
    _check(mixer, hidden_states, _attention(mixer, hidden_states, rotary=False, slopes=slopes))


def test_random_keys_are_not_projected(make_mixer: MakeMixer, hidden_states: Tensor) -> None:
    mixer = make_mixer("attention", groups=2, random_keys=True)
    keys = _keys_of(mixer)
    assert mixer.in_proj.weight.shape[0] == 2 * (2 + 1) * 6  # two queries and a value per group
    _check(mixer, hidden_states, _attention(mixer, hidden_states, rotary=False, keys=lambda s, g: keys[s, g].double()))


def _keys_of(mixer: Any, length: int = 13) -> Tensor:
    """Frozen keys [s, groups, d]."""
    groups = mixer.config.num_query_groups
    return mixer.frozen_keys(torch.zeros(1, length, groups, mixer.head_dim), 0, MixInput(0, groups))[0]


def test_random_keys_depend_on_position_head_layer_and_seed(make_mixer: MakeMixer) -> None:
    keys = _keys_of(make_mixer("attention", random_keys=True))
    assert len(torch.unique(keys.flatten(0, 1), dim=0)) == 13 * 4
    assert abs(float(keys.mean())) < 0.2
    assert 0.8 < float(keys.std()) < 1.2
    torch.testing.assert_close(keys, _keys_of(make_mixer("attention", random_keys=True)), rtol=0, atol=0)
    for other in ({"layer_number": 2}, {"random_keys_seed": 1}):
        assert not torch.isclose(keys, _keys_of(make_mixer("attention", random_keys=True, **other))).any()
    # A longer sequence starts with the same keys.
    torch.testing.assert_close(_keys_of(make_mixer("attention", random_keys=True), 16)[:13], keys, rtol=0, atol=0)


def test_random_keys_do_not_depend_on_tokens(make_mixer: MakeMixer, hidden_states: Tensor) -> None:
    """With values that mark positions, the output shows the weights. Earlier tokens do not change them."""
    mixer = make_mixer("attention", random_keys=True)
    x = torch.randn(13, 1, 4, 12, generator=torch.Generator().manual_seed(3))
    x[..., 6:] = torch.nn.functional.one_hot(torch.arange(13) % 6, 6)[:, None, None].float()
    before = mixer.mix(x, MixInput(0, 4))
    x[:12, ..., :6] += 1.0  # shift the features of all tokens but the last
    torch.testing.assert_close(mixer.mix(x, MixInput(0, 4))[12], before[12], rtol=0, atol=0)
    assert not torch.isclose(mixer.mix(x, MixInput(0, 4))[5], before[5]).any()  # a token's own query does
