"""Mixer of Native Sparse Attention: projections, shards of a sequence, operation counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from kernels.native_sparse_attention import native_sparse_attention
from megatron_ext.mixers.core.base import MixInput
from megatron_ext.mixers.core.history import EmptyHistory
from megatron_ext.mixers.core.settings import NSAConfig

MakeMixer = Callable[..., Any]
HEADS, WIDTH = 4, 6
SMALL = {"block_size": 2, "num_selected": 4, "window": 4}


def _turned(vector: Tensor, position: int) -> Tensor:
    numbers = torch.complex(vector[:3], vector[3:])
    angles = position * 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turned = numbers * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag])


def _all_turned(x_bthd: Tensor) -> Tensor:
    rows = [[[_turned(x, t) for x in heads] for t, heads in enumerate(sample)] for sample in x_bthd]
    return torch.stack([torch.stack([torch.stack(heads) for heads in sample]) for sample in rows])


@pytest.mark.parametrize("encoding", ["rope", "none"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_equals_op_on_projected_rows(make_mixer: MakeMixer, hidden_states: Tensor, encoding: str, groups: int) -> None:
    mixer = make_mixer("nsa", groups=groups, position_encoding=encoding, **SMALL)
    own, length = HEADS // groups, len(hidden_states)
    assert mixer.in_proj.weight.shape[0] == groups * ((own + 2) * WIDTH + 3 * own)
    projected = (hidden_states.double() @ mixer.in_proj.weight.double().T).transpose(0, 1)
    q, k, v, gates = [], [], [], []
    for row in projected.view(2, length, groups, -1).unbind(2):
        for head in range(own):
            q.append(row[..., head * WIDTH : (head + 1) * WIDTH])
            start = (own + 2) * WIDTH + 3 * head
            gates.append(row[..., start : start + 3])
        k.append(row[..., own * WIDTH : (own + 1) * WIDTH])
        v.append(row[..., (own + 1) * WIDTH : (own + 2) * WIDTH])
    q_bthd, k_bshd, v_bshd, logits = (torch.stack(x, 2) for x in (q, k, v, gates))
    if encoding == "rope":
        q_bthd, k_bshd = _all_turned(q_bthd), _all_turned(k_bshd)
    mixed = native_sparse_attention(q_bthd, k_bshd, v_bshd, 1 / (1 + torch.exp(-logits)), **SMALL)
    expected = mixed.transpose(0, 1).reshape(length, 2, -1) @ mixer.out_proj.weight.double().T
    torch.testing.assert_close(mixer(hidden_states)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_all_weights_have_gradients(make_mixer: MakeMixer, hidden_states: Tensor) -> None:
    mixer = make_mixer("nsa", groups=2, **SMALL)
    mixer(hidden_states)[0].square().sum().backward()
    assert bool((mixer.in_proj.weight.grad.abs().sum(1) > 0).all())
    assert bool(mixer.out_proj.weight.grad.isfinite().all())


class Seen(EmptyHistory):
    """Past that records the requests of a mixer."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}

    def prefix_rows(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        self.rows[name] = x_tbnw
        return x_tbnw


class Given(EmptyHistory):
    """Past that returns the shard's own rows with those before them."""

    def __init__(self, rows: dict[str, Tensor], own: slice) -> None:
        self._rows, self._own = rows, own

    def prefix_rows(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        torch.testing.assert_close(x_tbnw, self._rows[name][self._own], rtol=0, atol=0)
        return self._rows[name][: self._own.stop]


@pytest.mark.parametrize("start", [0, 4, 7])
def test_sequence_shard(make_mixer: MakeMixer, start: int) -> None:
    """Context parallelism by gathering: queries and gates of the own shard, keys and values of all shards up to it."""
    mixer = make_mixer("nsa", groups=2, **SMALL)
    x_tbuw = torch.randn(13, 2, 2, mixer.head_group_width(), generator=torch.Generator().manual_seed(3))
    seen = Seen()
    whole = mixer.mix(x_tbuw, MixInput(0, 2, history=seen))
    assert {name: rows.shape for name, rows in seen.rows.items()} == dict.fromkeys(
        ("keys", "values"), (13, 2, 2, WIDTH)
    )
    own = slice(start, start + 6)
    part = mixer.mix(x_tbuw[own], MixInput(0, 2, first_position=start, history=Given(seen.rows, own)))
    torch.testing.assert_close(part, whole[own], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole, mixer.mix(x_tbuw, MixInput(0, 2)), rtol=0, atol=0)


def test_subset_of_groups(make_mixer: MakeMixer) -> None:
    mixer = make_mixer("nsa", groups=2, **SMALL)
    x_tbuw = torch.randn(13, 2, 2, mixer.head_group_width(), generator=torch.Generator().manual_seed(3))
    whole = mixer.mix(x_tbuw, MixInput(0, 2))
    torch.testing.assert_close(mixer.mix(x_tbuw[:, :, 1:], MixInput(1, 1)), whole[:, :, 1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_selected", "window"), [(8, 100), (1000, 5000)])
def test_operations(make_mixer: MakeMixer, num_selected: int, window: int) -> None:
    """Compare with a count for long sequences. The formula counts a query's own block in full."""
    size, length = 8, 4096
    mixer = make_mixer("nsa", block_size=size, num_selected=num_selected, window=window)
    attended = 0
    for t in range(length):
        own = t // size
        attended += (t + 1) // size  # mean keys
        attended += min(num_selected - 1, own) * size + t % size + 1
        attended += min(window, t + 1)
    by_hand = HEADS * attended * 2 * 2 * WIDTH / length
    assert mixer.mixing_flops(length) == pytest.approx(by_hand, rel=0.03)


def test_block_size_is_power_of_two() -> None:
    with pytest.raises(ValidationError, match="power of two"):
        NSAConfig(block_size=48)
