"""Selection of the Hopper kernels by shape. Tests of the op on a Hopper GPU check their values."""

import pytest
import torch
from triton_cases import BF16, DEVICE, FP32, sort_small_blocks

pytest.importorskip("triton")

from kernels.top1_chunk import top1_chunk_attention, triton_attend_hopper, triton_launch, triton_launch_screening

BOTH, CHOSEN, NONE = ["chosen", "local"], ["chosen"], []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, BOTH),
        ({"t": 130}, CHOSEN),  # the kernel for the own chunk would load beyond a partial chunk
        ({"cu_seqlens": torch.tensor([0, 64, 128])}, CHOSEN),
        ({"local": False}, CHOSEN),
        ({"top_k": 2}, NONE),  # several parts are kept in fp32
        ({"dtype": FP32}, NONE),
        ({"d": 32}, NONE),
        ({"chunk_size": 32}, NONE),
        ({"hopper": False}, NONE),
    ],
)
def test_supported_shapes(monkeypatch, options, expected):
    given = {"t": 128, "d": 64, "dtype": BF16, "hopper": True, "chunk_size": 64, **options}
    t, d, dtype, hopper = (given.pop(name) for name in ("t", "d", "dtype", "hopper"))
    called = []
    sort_small_blocks(monkeypatch)
    for module in (triton_launch, triton_launch_screening):
        monkeypatch.setattr(module, "on_hopper", lambda x: hopper)
    for name in BOTH:
        monkeypatch.setattr(triton_attend_hopper, f"attend_{name}", lambda *args, name=name: called.append(name))
    q, k = torch.zeros(1, t, 2, d, dtype=dtype, device=DEVICE), torch.zeros(1, t, 1, d, dtype=dtype, device=DEVICE)
    top1_chunk_attention(q, k, k, score="approx", implementation="triton", **given)
    assert called == expected
