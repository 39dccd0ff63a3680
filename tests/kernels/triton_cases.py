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
"""Samples, where what is tested is alike for each."""

# The interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {FP32: 1e-5, BF16: 5e-3 if ON_GPU else 1e-2, FP16: 1e-3}


def draw(tq, tk=None, heads=(2, 1), d=16, dtype=FP32, batch=1, step=0.5, seed=0) -> list[Tensor]:
    """Give q, k, v and a gradient of the output; q and k in multiples of `step`, v and the gradient of any value.

    On such a grid products are exact in fp32 in any order of summation.
    """
    gen = torch.Generator().manual_seed(seed)
    tk = tk or tq
    shapes = [(batch, tq, heads[0], d), *[(batch, tk, heads[1], d)] * 2, (batch, tq, heads[0], d)]
    q, k, v, grad = (torch.randn(*shape, generator=gen) for shape in shapes)
    q, k = ((x / step).round().clamp(-3 / step, 3 / step) * step for x in (q, k))
    return [x.to(DEVICE, dtype) for x in (q, k, v, grad)]


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill what torch.empty gives with NaN: what a kernel fails to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def sort_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, where sorts of large blocks take seconds."""
    if not ON_GPU:
        monkeypatch.setattr("kernels.top1_chunk.triton_group.ORDER_BLOCK", 32)


def relative_rms(got: Tensor, expected: Tensor, least: float = 0.1) -> float:
    error = (got.double() - expected).square().mean().sqrt()
    # Where the gradient is zero, as that of a softmax over one key, rounding leaves a little.
    return (error / expected.square().mean().sqrt().clamp(min=least)).item()
