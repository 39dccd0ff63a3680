"""Linear layer with fp32 accumulation, compared with float64 on this machine's device."""

from __future__ import annotations

import pytest
import torch

from kernels.common.linear import linear_to_fp32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("dtype", "found_dtype", "forward", "backward"),
    [
        (torch.bfloat16, torch.float32, 1e-6, 5e-3),
        (torch.float16, torch.float32, 1e-6, 1e-3),
        (torch.float32, torch.float32, 1e-6, 1e-6),
        (torch.float64, torch.float64, 1e-14, 1e-14),
    ],
)
def test_accumulates_in_fp32(dtype: torch.dtype, found_dtype: torch.dtype, forward: float, backward: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)
        for shape in ((5, 3, 200), (40, 200), (5, 3, 40))
    )
    x, weight = (y.to(dtype).requires_grad_() for y in (x, weight))
    out = linear_to_fp32(x, weight)
    assert (out.dtype, out.shape) == (found_dtype, (5, 3, 40))
    found = [out, *torch.autograd.grad(out, [x, weight], grad.to(out.dtype))]
    exact_x, exact_weight = (y.detach().double() for y in (x, weight))
    expected = [
        exact_x @ exact_weight.T,
        grad @ exact_weight,
        torch.einsum("abm,abn->mn", grad, exact_x),
    ]
    for one, other, limit in zip(found, expected, (forward, backward, backward), strict=True):
        assert float((one - other).norm() / other.norm()) < limit
