"""Decoding with every mixer token by token, compared with all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_mixer_common import VARIANTS
from torch import Tensor

from megatron_ext.evaluation.decoding import with_decode_caches
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.mixers.core.registry import load_all

MakeMixer = Callable[..., Any]

CASES = [
    *VARIANTS,
    ("attention", {"window": 3, "random_keys": True}),
    ("attention", {"window": 3, "position_encoding": "alibi", "groups": 2}),
    ("attention", {"window": 1}),
    ("gated_deltanet", {"conv_kernel_size": 1}),
]

HAS_STATE = {name for name, entry in load_all().items() if entry.traits.supports_state_passing}
CONSTANT = [(name, fields) for name, fields in VARIANTS if name in HAS_STATE or fields == {"window": 3}]
"""Mixers whose decode cache does not grow: those with a state, and attention over a window."""


def _by_pieces(mixer: Mixer, x_tbh: Tensor, lengths: Sequence[int]) -> Tensor:
    with with_decode_caches(mixer):
        return torch.cat([mixer(piece)[0] for piece in x_tbh.split(list(lengths))])


def _numbers_kept(mixer: Mixer) -> int:
    """Number of elements in the decode cache, including tensors of which only a view is used."""
    assert mixer.decode_cache is not None
    return mixer.decode_cache.num_bytes // torch.float32.itemsize


@pytest.mark.parametrize("lengths", [[5, *[1] * 8], [1] * 13, [1, 6, 2, 4]], ids=["prompt", "alone", "pieces"])
@pytest.mark.parametrize(("name", "fields"), CASES)
def test_decoding_in_pieces_equals_whole_sequence(
    make_mixer: MakeMixer, hidden_states: Tensor, name: str, fields: dict[str, Any], lengths: list[int]
) -> None:
    """Mixers that select agree, too: no two of these scores are so close that rounding could change a choice."""
    mixer = make_mixer(name, **fields)
    whole = mixer(hidden_states)[0]
    near = 1e-5 * float(whole.detach().abs().max())
    torch.testing.assert_close(_by_pieces(mixer, hidden_states, lengths), whole, rtol=1e-5, atol=near)


@pytest.mark.parametrize(("name", "fields"), CONSTANT)
def test_state_caches_do_not_grow(make_mixer: MakeMixer, name: str, fields: dict[str, Any]) -> None:
    mixer = make_mixer(name, **fields)
    x = torch.randn(40, 2, mixer.config.hidden_size, generator=torch.Generator().manual_seed(5))
    with with_decode_caches(mixer):
        mixer(x[:9])
        mixer(x[9:10])
        after_ten = _numbers_kept(mixer)
        for token in x[10:].split(1):
            mixer(token)
        assert _numbers_kept(mixer) == after_ten > 0


def test_decode_cache_size(make_mixer: MakeMixer) -> None:
    """Cache sizes derived by hand, for two samples of 4 heads x 6 after seven positions, the last one decoded alone."""
    x = torch.randn(7, 2, 24, generator=torch.Generator().manual_seed(5))
    expected = {
        ("retnet", None): 2 * 4 * 6 * 12,
        ("gated_deltanet", None): 2 * 4 * (6 * 6 + 3 * 3 * 6),  # state, and three rows of query, key and value
        ("attention", 3): 2 * 2 * 4 * 6 * 2,  # two keys and two values
        # Capacity nine: 1.5 times the length when the cache was full.
        ("attention", None): 9 * 2 * 4 * 6 * 2,
        ("top1_chunk", None): 9 * 2 * 4 * 6 * 2,
    }
    for (name, window), numbers in expected.items():
        mixer = make_mixer(name, **({"window": window} if window else {}))
        with with_decode_caches(mixer):
            mixer(x[:6])
            mixer(x[6:])
            assert _numbers_kept(mixer) == numbers, name


def test_growing_cache_is_rarely_copied(make_mixer: MakeMixer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies happen at capacities 1, 2, 3, 4, 6, 9, 13, 19, 28 and 42, once each for keys and values."""
    mixer = make_mixer("attention")
    made: list[int] = []
    monkeypatch.setattr(
        Tensor, "new_empty", lambda x, *size, plain=Tensor.new_empty: made.append(size[0]) or plain(x, *size)
    )
    x = torch.randn(40, 2, 24, generator=torch.Generator().manual_seed(5))
    with with_decode_caches(mixer):
        for token in x.split(1):
            mixer(token)
    assert made == [n for n in (1, 2, 3, 4, 6, 9, 13, 19, 28, 42) for _ in "kv"]


def test_decode_cache_is_released(make_mixer: MakeMixer, hidden_states: Tensor) -> None:
    mixer = make_mixer("gated_deltanet")
    first = _by_pieces(mixer, hidden_states, [6, 7])
    assert mixer.decode_cache is None
    assert mixer.training
    assert not first.requires_grad
    torch.testing.assert_close(_by_pieces(mixer, hidden_states, [6, 7]), first, rtol=0, atol=0)
    assert mixer(hidden_states)[0].requires_grad


def test_mixer_without_history_access_is_detected(make_mixer: MakeMixer, hidden_states: Tensor) -> None:
    mixer = make_mixer("attention")
    mixer.mix = lambda x_tbuw, part: x_tbuw[..., :6]
    with with_decode_caches(mixer):
        mixer(hidden_states)
        with pytest.raises(AssertionError, match="this one does not"):
            mixer(hidden_states)
