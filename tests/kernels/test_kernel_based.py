"""Based: the plain form, and the way features take to fla's kernels, against a float64 sum over all pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.based import based, by_features, features, interface, num_features
from kernels.gated_linear_attention import gated_linear_attention


def all_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each weight by itself."""
    scores = torch.einsum("bthf,bshf->bhts", q.double(), k.double()) / math.sqrt(q.shape[-1])
    weights = (1 + scores + scores**2 / 2).tril()
    return torch.einsum("bhts,bshe->bthe", weights / weights.sum(-1, keepdim=True), v.double())


def inputs(length: int, width: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    gen = torch.Generator().manual_seed(length)
    sizes = (width, width, 5)
    return [torch.randn(2, length, 3, size, generator=gen, dtype=torch.float64).to(dtype) for size in sizes]


@pytest.mark.parametrize("width", [1, 2, 3, 6, 16])
@pytest.mark.parametrize("length", [1, 17, 130])
def test_it_is_the_sum_over_pairs(length: int, width: int) -> None:
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


def test_a_walk_may_begin_with_a_state() -> None:
    whole = inputs(30)
    states: list[Tensor | None] = [None]

    def walk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"scale": 1.0, "initial_state": states[-1], "return_final_state": True}
        out, state = gated_linear_attention(q, k, v, **options)
        states.append(state)
        return out

    parts = [[x[:, rows] for x in whole] for rows in (slice(13), slice(13, None))]
    found = [by_features(*part, walk, dtype=torch.float64) for part in parts]
    torch.testing.assert_close(torch.cat(found, 1), all_pairs(*whole), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("length", "by_pairs"), [(40, True), (41, False)])
def test_long_sequences_go_to_fla_by_features(monkeypatch: pytest.MonkeyPatch, length: int, by_pairs: bool) -> None:
    """fla's two ops are replaced by plain torch."""
    ops = pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed")
    monkeypatch.setattr(interface, "choose_fla_or_plain", lambda *_: "fla")
    seen: list[Any] = []

    def parallel_based(*arguments: Tensor) -> Tensor:
        seen.append("pairs")
        return all_pairs(*arguments).bfloat16()

    def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any) -> tuple[Tensor, None]:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1], q.dtype, k.dtype, v.dtype))
        return gated_linear_attention(q, k, v, scale=scale), None

    monkeypatch.setattr(ops.based, "parallel_based", parallel_based)
    monkeypatch.setattr(ops.simple_gla, "chunk_simple_gla", chunk_simple_gla)
    arguments = inputs(length, width=6, dtype=torch.bfloat16)
    out = based(*arguments, quadratic_up_to=40)
    assert seen == ["pairs" if by_pairs else (32, 32, 16, *[torch.bfloat16] * 3)]
    assert out.dtype == torch.bfloat16
    expected = all_pairs(*arguments)
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_kernel_fla.py holds it to the plain form")
@pytest.mark.parametrize(("length", "width"), [(1, 16), (70, 5), (200, 16)])
def test_flas_weights_and_normaliser_are_ours(length: int, width: int) -> None:
    """Its kernel over pairs in Triton's interpreter, in fp32."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    results = []
    for form in (interface._fla_by_pairs, all_pairs):
        arguments = [x.requires_grad_() for x in inputs(length, width, torch.float32)]
        out = form(*arguments)
        results.append([out, *torch.autograd.grad(out.sin().sum(), arguments)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "by_pairs", "dtype", "message"),
    [
        (16, True, torch.bfloat16, None),
        (128, True, torch.bfloat16, None),
        (129, True, torch.bfloat16, "queries are 129 wide: give at most 128"),
        (21, False, torch.bfloat16, None),
        (22, False, torch.bfloat16, "queries 22 wide have 276 features, for 3 positions at most 256: narrow them"),
        (16, True, torch.float16, "sums of weights can be too large for torch.float16: convert the inputs to torch.bf"),
    ],
)
def test_what_is_in_the_way_of_fla(width: int, by_pairs: bool, dtype: torch.dtype, message: str | None) -> None:
    found = interface._refused(torch.zeros(1, 3, 1, width, dtype=dtype), by_pairs)
    assert found is None if message is None else found is not None and found.startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 9)}, r"q has shape \[2, 9\]"),
        ({"k": torch.zeros(2, 9, 3, 5)}, r"k has shape \[2, 9, 3, 5\]: give \[2, 9, 3, 4\]"),
        ({"v": torch.zeros(2, 8, 3, 5)}, r"v has shape \[2, 8, 3, 5\]"),
        ({"v": torch.zeros(2, 9, 3, 5, dtype=torch.bfloat16)}, "v has dtype torch.bfloat16 but q has torch.float32"),
        ({"implementation": "fla"}, "implementation is 'fla', but the inputs are on cpu"),
        ({"implementation": "parallel"}, "implementation is 'parallel', but based has"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = dict(zip("qkv", inputs(9, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        based(**arguments)
