"""Isolated documents in one batch, compared with one call of the mixer per document: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ext.mixers.core import documents
from megatron_ext.mixers.core.registry import load_all

APART = sorted(name for name, entry in load_all().items() if entry.traits.supports_document_masking)
FIELDS: dict[str, dict[str, Any]] = {
    "top1_chunk": {"chunk_size": 2},
    "moba": {"block_size": 2, "top_k": 2},
    "nsa": {"block_size": 2, "num_selected": 3, "window": 3},
}
VARIANTS = [
    *((name, FIELDS.get(name, {})) for name in APART),
    ("attention", {"window": 3}),
    ("attention", {"position_encoding": "alibi"}),
    ("attention", {"random_keys": True}),
    ("top1_chunk", {"chunk_size": 2, "score": "approx", "top_k": 2}),
]

BOUNDS = [0, 1, 6, 13, 15, 26]
"""Bounds of the documents in two samples of 13 tokens. One document is a single token, others vary in length."""


def _packed(mixer: Any, x: Tensor) -> Tensor:
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
    out: Tensor = mixer(x, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens))[0]
    return out


def _alone(mixer: Any, x: Tensor) -> Tensor:
    """Call the mixer for each document."""
    flat = x.transpose(0, 1).flatten(0, 1)
    alone = [mixer(flat[start:end].unsqueeze(1))[0].squeeze(1) for start, end in pairwise(BOUNDS)]
    return torch.cat(alone).unflatten(0, (2, 13)).transpose(0, 1)


def _gradients(mixer: Any, out: Tensor, x: Tensor) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), [x, *mixer.parameters()]))


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_documents_are_mixed_separately(
    make_mixer: Callable[..., Any], hidden_states: Tensor, name: str, fields: dict[str, Any]
) -> None:
    mixer, x = make_mixer(name, **fields), hidden_states.clone().requires_grad_()
    packed, expected = _packed(mixer, x), _alone(mixer, x)
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed, mixer(x)[0], rtol=1e-3, atol=1e-3)  # without isolation documents do interact
    for one, other in zip(_gradients(mixer, packed, x), _gradients(mixer, expected, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_documents_in_float64(
    make_mixer: Callable[..., Any], hidden_states: Tensor, name: str, fields: dict[str, Any]
) -> None:
    mixer, x = make_mixer(name, **fields).double(), hidden_states.double().requires_grad_()
    packed, expected = _packed(mixer, x), _alone(mixer, x)
    assert packed.dtype == torch.float64
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-10)
    for one, other in zip(_gradients(mixer, packed, x), _gradients(mixer, expected, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_batched_pieces(
    make_mixer: Callable[..., Any],
    hidden_states: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fields: dict[str, Any],
) -> None:
    """Batch pieces as on a GPU: five pieces in four calls. The first call has two pieces, of 1 and 2 tokens."""
    monkeypatch.setattr(documents, "BATCHED_DEVICES", ("cpu",))
    monkeypatch.setattr(documents, "MIN_PADDED_LENGTH", 2)
    mixer, x = make_mixer(name, **fields), hidden_states.clone().requires_grad_()
    shapes = _shapes_of_calls(mixer, monkeypatch)
    packed, expected = _packed(mixer, x), _alone(mixer, x)
    assert shapes[:3] == [(2, 2), (6, 1), (8, 1)]
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(_gradients(mixer, packed, x), _gradients(mixer, expected, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def _shapes_of_calls(mixer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen, mix = [], mixer.mix

    def watched(x_tbuw: Tensor, part: Any) -> Tensor:
        seen.append(tuple(x_tbuw.shape[:2]))
        out: Tensor = mix(x_tbuw, part)
        return out

    monkeypatch.setattr(mixer, "mix", watched)
    return seen


def test_token_shifting_mixers_do_not_support_document_masking() -> None:
    assert set(load_all()) - set(APART) == {"rwkv6", "rwkv7"}


@pytest.mark.parametrize("bounds", [[0, 13, 25], [0, 14, 26], [0, 26]])
def test_offsets_of_wrong_batch(make_mixer: Callable[..., Any], hidden_states: Tensor, bounds: list[int]) -> None:
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds))
    with pytest.raises(AssertionError, match="pieces do not fit the batch"):
        make_mixer("attention")(hidden_states, packed_seq_params=packed)
