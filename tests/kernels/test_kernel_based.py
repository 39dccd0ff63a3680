"""Based in plain torch and flash-linear-attention's kernel, compared with a float64 sum over all pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.based import based, by_features, features, num_features
from kernels.gated_linear_attention import gated_linear_attention


def all_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the weight of each query-key pair explicitly."""
    scores = torch.einsum("bthf,bshf->bhts", q.double(), k.double()) / math.sqrt(q.shape[-1])
    weights = (1 + scores + scores**2 / 2).tril()
    return torch.einsum("bhts,bshe->bthe", weights / weights.sum(-1, keepdim=True), v.double())


def inputs(length: int, width: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    gen = torch.Generator().manual_seed(length)
    sizes = (width, width, 5)
    return [torch.randn(2, length, 3, size, generator=gen, dtype=torch.float64).to(dtype) for size in sizes]


@pytest.mark.parametrize("width", [1, 2, 3, 6, 16])
@pytest.mark.parametrize("length", [1, 17, 130])
def test_matches_the_sum_over_pairs(length: int, width: int) -> None:
    arguments = inputs(length, width)
    torch.testing.assert_close(based(*arguments), all_pairs(*arguments), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_close_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    arguments = inputs(50, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = based(*arguments)
    assert out.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), all_pairs(*arguments), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [2, 3])
def test_gradient_by_finite_differences(width: int) -> None:
    assert torch.autograd.gradcheck(based, [x.requires_grad_() for x in inputs(9, width)])


@pytest.mark.parametrize("width", [1, 2, 3, 6, 7])
def test_products_of_features_are_the_weights(width: int) -> None:
    q, k, _ = inputs(11, width)
    left, right = (features.taylor_features(x, torch.float64) for x in (q, k))
    assert left.shape[-1] == num_features(width) == 1 + width + math.comb(width + 1, 2)
    score = (q * k).sum(-1) / math.sqrt(width)
    torch.testing.assert_close((left * right).sum(-1), 1 + score + score**2 / 2, rtol=1e-12, atol=1e-12)


def test_scan_from_an_initial_state() -> None:
    whole = inputs(30)
    states: list[Tensor | None] = [None]

    def scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"scale": 1.0, "initial_state": states[-1], "output_final_state": True}
        out, state = gated_linear_attention(q, k, v, **options)
        states.append(state)
        return out

    parts = [[x[:, rows] for x in whole] for rows in (slice(13), slice(13, None))]
    found = [by_features(*part, scan, dtype=torch.float64) for part in parts]
    torch.testing.assert_close(torch.cat(found, 1), all_pairs(*whole), rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU fla's kernel rounds what it multiplies")
@pytest.mark.parametrize(("length", "width"), [(1, 16), (70, 5), (200, 16)])
def test_weights_and_normaliser_match_fla(length: int, width: int) -> None:
    """Compare with fla's `parallel_based` kernel in fp32, in Triton's interpreter."""
    ops = pytest.importorskip("fla.ops.based", reason="flash-linear-attention is not installed")
    results = []
    for form in (ops.parallel_based, based):
        arguments = [x.requires_grad_() for x in inputs(length, width, torch.float32)]
        out = form(*arguments)
        results.append([out, *torch.autograd.grad(out.sin().sum(), arguments)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 9)}, r"q has shape \[2, 9\]"),
        ({"k": torch.zeros(2, 9, 3, 5)}, r"k has shape \[2, 9, 3, 5\]: give \[2, 9, 3, 4\]"),
        ({"v": torch.zeros(2, 8, 3, 5)}, r"v has shape \[2, 8, 3, 5\]"),
        ({"v": torch.zeros(2, 9, 3, 5, dtype=torch.bfloat16)}, "v has dtype torch.bfloat16 but q has torch.float32"),
        ({"implementation": "fla"}, "implementation is 'fla', but based has"),
        ({"implementation": "parallel"}, "implementation is 'parallel', but based has"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, Any], message: str) -> None:
    arguments = dict(zip("qkv", inputs(9, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        based(**arguments)
