"""Top-1 mixers with projections and rotary embeddings, compared with brute force in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

MakeMixer = Callable[..., Any]


def _turned(vector: Tensor, position: int) -> Tensor:
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(vector))
        x, y = float(vector[i]), float(vector[half + i])
        out[i] = x * math.cos(angle) - y * math.sin(angle)
        out[half + i] = y * math.cos(angle) + x * math.sin(angle)
    return out


def _mix(mixer: Any, x_tbh: Tensor, rotary: bool, weights: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mix the values of every head by `weights(q, keys up to the query)`, then project."""
    rows = (x_tbh.double() @ mixer.in_proj.weight.double().T).view(*x_tbh.shape[:2], mixer.num_head_groups(), -1, 6)
    length, batch, groups, parts, d = rows.shape
    turn = _turned if rotary else lambda vector, _: vector
    out = torch.zeros(length, batch, groups, parts - 2, d, dtype=torch.float64)
    for b in range(batch):
        for group in range(groups):
            keys = torch.stack([turn(rows[s, b, group, -2], s) for s in range(length)])
            for own in range(parts - 2):
                for t in range(length):
                    q = turn(rows[t, b, group, own], t)
                    out[t, b, group, own] = weights(q, keys[: t + 1]) @ rows[: t + 1, b, group, -1]
    return out.reshape(length, batch, -1) @ mixer.out_proj.weight.double().T


def _best_element(q: Tensor, keys: Tensor) -> Tensor:
    weights = torch.zeros(len(keys), dtype=torch.float64)
    weights[max(range(len(keys)), key=lambda s: float(q @ keys[s]))] = 1.0
    return weights


@pytest.mark.parametrize("estimator", ["straight_through", "selected"])
@pytest.mark.parametrize("encoding", ["rope", "none"])
@pytest.mark.parametrize("groups", [4, 2])
def test_top1_element_selects_best_key(
    make_mixer: MakeMixer, hidden_states: Tensor, estimator: str, encoding: str, groups: int
) -> None:
    mixer = make_mixer("top1_element", groups=groups, estimator=estimator, position_encoding=encoding)
    expected = _mix(mixer, hidden_states, encoding == "rope", _best_element)
    torch.testing.assert_close(mixer(hidden_states)[0].double(), expected, rtol=1e-5, atol=1e-5)


def _chunk_weights(score: str, size: int, top_k: int, local: bool) -> Callable[[Tensor, Tensor], Tensor]:
    scale = 6**-0.5
    scores = {
        "approx": lambda q, keys: float(q @ keys.mean(0)),
        "exact": lambda q, keys: max(float(q @ key) for key in keys),
        "exact_lse": lambda q, keys: math.log(sum(math.exp(scale * float(q @ key)) for key in keys)),
    }

    def weights(q: Tensor, keys: Tensor) -> Tensor:
        own = (len(keys) - 1) // size
        order = sorted(range(own), key=lambda c: -scores[score](q, keys[c * size : (c + 1) * size]))
        chosen = set(order[:top_k]) | ({own} if local or own == 0 else set())
        seen = torch.tensor([s // size in chosen for s in range(len(keys))])
        return torch.softmax((keys @ q * scale).masked_fill(~seen, -torch.inf), 0)

    return weights


@pytest.mark.parametrize("score", ["approx", "exact", "exact_lse"])
@pytest.mark.parametrize(("top_k", "local", "groups"), [(1, True, 4), (2, True, 2), (1, False, 1)])
def test_top1_chunk_attends_to_best_chunks(
    make_mixer: MakeMixer, hidden_states: Tensor, score: str, top_k: int, local: bool, groups: int
) -> None:
    mixer = make_mixer("top1_chunk", groups=groups, chunk_size=4, score=score, top_k=top_k, local=local)
    expected = _mix(mixer, hidden_states, True, _chunk_weights(score, 4, top_k, local))
    torch.testing.assert_close(mixer(hidden_states)[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("top_k", "groups", "encoding"), [(2, 4, "rope"), (3, 2, "none")])
def test_moba_attends_to_own_and_best_blocks(
    make_mixer: MakeMixer, hidden_states: Tensor, top_k: int, groups: int, encoding: str
) -> None:
    mixer = make_mixer("moba", groups=groups, block_size=4, top_k=top_k, position_encoding=encoding)
    expected = _mix(mixer, hidden_states, encoding == "rope", _chunk_weights("approx", 4, top_k - 1, True))
    torch.testing.assert_close(mixer(hidden_states)[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 4])
def test_moba_with_all_blocks_equals_attention(make_mixer: MakeMixer, hidden_states: Tensor, block_size: int) -> None:
    moba = make_mixer("moba", block_size=block_size, top_k=13)
    torch.testing.assert_close(moba(hidden_states)[0], make_mixer("attention")(hidden_states)[0], rtol=1e-5, atol=1e-5)
