"""Rotary embeddings: the definition of the paper, and fused splitting and rotation of heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.mixers.core.rotary import frequencies, rotate, rotated_heads, rotation


def turned_from(x_tbnd: Tensor, base: float, first_position: int) -> Tensor:
    return rotate(x_tbnd, rotation(first_position, len(x_tbnd), x_tbnd.shape[-1], base, x_tbnd.device))


def test_rotation_equals_complex_multiplication() -> None:
    x = torch.randn(5, 2, 3, 8, generator=torch.Generator().manual_seed(1))
    numbers = torch.complex(x[..., :4].double(), x[..., 4:].double())
    positions = torch.arange(100, 105, dtype=torch.float64)
    angles = positions[:, None] / 500.0 ** (torch.arange(4, dtype=torch.float64) / 4)
    turned = numbers * torch.exp(1j * angles)[:, None, None]
    found = turned_from(x, 500.0, 100)
    torch.testing.assert_close(found.double(), torch.cat([turned.real, turned.imag], -1), rtol=1e-4, atol=1e-4)
    assert turned_from(x.bfloat16(), 500.0, 0).dtype == torch.bfloat16


def test_rotation_from_offset() -> None:
    x = torch.randn(6, 1, 1, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(turned_from(x[2:], 10000.0, 2), turned_from(x, 10000.0, 0)[2:], rtol=0, atol=0)


def test_rotated_scores_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator) for _ in range(2))
    scores = [(turned_from(q, 100.0, 5 + shift) * turned_from(k, 100.0, 2 + shift)).sum() for shift in (0, 1, 40)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-4, atol=1e-4)


def test_rotated_heads() -> None:
    t, b, u, g, d, e = 5, 2, 3, 4, 8, 16
    x = torch.randn(t, b, u, g * d + d + e, generator=torch.Generator().manual_seed(3))
    by = rotation(7, t, d, 100.0, x.device)
    q, k, v = rotated_heads(x, by, [g * d, d, e])
    for found, expected in ((k, x[..., g * d : g * d + d]), (v, x[..., g * d + d :])):
        expected = turned_from(expected, 100.0, 7) if found is k else expected
        torch.testing.assert_close(found, expected.transpose(0, 1), rtol=0, atol=0)
        assert found.is_contiguous()
    for head_group in range(u):
        for query in range(g):
            own = turned_from(x[:, :, head_group : head_group + 1, query * d : (query + 1) * d], 100.0, 7)
            torch.testing.assert_close(q[:, :, head_group * g + query], own[:, :, 0].transpose(0, 1), rtol=0, atol=0)


@pytest.mark.parametrize(("width", "base"), [(128, 10000.0), (128, 500000.0), (64, 10000.0), (80, 1e6)])
def test_frequencies_equal_transformers(width: int, base: float) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_attention_heads=1,
        head_dim=width,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    theirs = llama.LlamaRotaryEmbedding(config)
    assert torch.equal(frequencies(width, base), theirs.inv_freq)
    cos, sin = theirs(torch.zeros(1, 1), torch.arange(8192)[None])
    by = rotation(0, 8192, width, base, torch.device("cpu"))
    for found, expected in zip(by, (cos, sin), strict=True):
        torch.testing.assert_close(found, expected[0, :, : width // 2], rtol=0, atol=1e-6)
