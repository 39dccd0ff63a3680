"""Shared parts of the tests of Triton kernels: device, inputs and tolerances."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FEW = 2 if ON_GPU else 1
"""Batch size for tests that treat all samples alike."""

# Triton's interpreter truncates to bf16 instead of rounding.
TOLERANCE = {FP32: 1e-5, BF16: 5e-3 if ON_GPU else 1e-2, FP16: 1e-3}


def draw(tq, tk=None, heads=(2, 1), d=16, dtype=FP32, batch=1, step=0.5, seed=0) -> list[Tensor]:
    """Draw q, k, v and a gradient of the output. q and k are multiples of `step`.

    On such a grid, products are exact in fp32 in any order of summation.
    """
    gen = torch.Generator().manual_seed(seed)
    tk = tk or tq
    shapes = [(batch, tq, heads[0], d), *[(batch, tk, heads[1], d)] * 2, (batch, tq, heads[0], d)]
    q, k, v, grad = (torch.randn(*shape, generator=gen) for shape in shapes)
    q, k = ((x / step).round().clamp(-3 / step, 3 / step) * step for x in (q, k))
    return [x.to(DEVICE, dtype) for x in (q, k, v, grad)]


@pytest.fixture
def poison() -> Iterator[None]:
    """Make `torch.empty` return NaN, so that elements that a kernel fails to write are detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def sort_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sort smaller blocks in the interpreter, where sorts of large blocks take seconds."""
    if not ON_GPU:
        monkeypatch.setattr("kernels.top1_chunk.triton_group.ORDER_BLOCK", 32)


def relative_rms(actual: Tensor, expected: Tensor, least: float = 0.1) -> float:
    error = (actual.double() - expected).square().mean().sqrt()
    # A gradient that should be zero, such as that of a softmax over one key, is nonzero due to rounding.
    return (error / expected.square().mean().sqrt().clamp(min=least)).item()
