"""Based's Triton kernels, compared with plain torch in float64: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from covering import cases
from torch.utils.checkpoint import checkpoint
from triton_cases import BF16, DEVICE, FEW, FP16, FP32, ON_GPU, TOLERANCE, needs_gpu, poison, relative_rms

pytest.importorskip("triton")

from kernels.based import based, triton_launch

# In the interpreter, masked lanes compute infinities and NaN with numpy, which warns about them.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poison", "small")]

__all__ = ["poison"]  # imported as a fixture

DTYPE = BF16 if ON_GPU else FP32
"""The kernels do not support fp32 on a GPU."""

WIDTH, VALUE, LONG = (16, 64, 500) if ON_GPU else (3, 20, 40)
"""Feature width, value width and length. In the interpreter, the length spans two chunks and three tiles."""

GPU_CASES = [
    (width, value, length)
    for width, value in [(16, 64), (16, 128), (8, 64), (5, 40), (24, 100), (32, 64), (16, 256)]
    for length in (1, 20, 63, 128, 200, 1000, 8000)
]
CASES = cases(
    every=[(5, 40, 1), (16, 20, 1), (5, 40, 16), (16, 20, 32), (16, 20, 40), (5, 40, 75)],
    default=[(16, 20, 1), (5, 40, 16), (16, 20, 40)],
)


@pytest.fixture
def small(monkeypatch):
    """Reduce chunk and tile sizes in the interpreter, so that short sequences span several of them."""
    if not ON_GPU:
        tune(monkeypatch, CHUNK=32, tile=16)


def tune(monkeypatch, tile=None, **more):
    for name, value in more.items():
        monkeypatch.setattr(triton_launch, name, value)
    for name in ("SUM", "READ", "WRITE_QUERIES", "WRITE_KEYS") if tile else ():
        monkeypatch.setattr(triton_launch, name, getattr(triton_launch, name)._replace(tile=tile))


def draw(length, width=WIDTH, value=VALUE, batch=2, heads=3 if ON_GPU else 2, dtype=DTYPE):
    """Draw queries, keys, values and a gradient of the output."""
    gen = torch.Generator().manual_seed(length)
    sizes = (width, width, value, value)
    return [torch.randn(batch, length, heads, size, generator=gen).to(DEVICE, dtype) for size in sizes]


def run(tensors, implementation):
    """Return the output and the gradients of q, k and v."""
    *inputs, dout = [x.detach().requires_grad_() for x in tensors]
    out = based(*inputs, implementation=implementation)
    return out, *torch.autograd.grad(out, inputs, dout)


def check(tensors):
    """Compare the output and all gradients with plain torch."""
    expected = run([x.double() for x in tensors], "chunked")
    for name, x, a, b in zip(
        ["o", "q", "k", "v"], [tensors[2], *tensors[:3]], run(tensors, "triton"), expected, strict=True
    ):
        assert a.dtype == x.dtype, name
        assert a.shape == b.shape, name
        # With a single token, the gradients of q and k are zero except for rounding.
        error = relative_rms(a, b, least=1e-12 if a.shape[1] > 1 else 0.1)
        assert error < TOLERANCE[x.dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize(("width", "value", "length"), GPU_CASES if ON_GPU else CASES)
def test_matches_plain_torch(width, value, length):
    check(draw(length, width, value))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bits(dtype):
    check(draw(LONG, batch=FEW, dtype=dtype))


@pytest.mark.parametrize(
    "tuning",
    [  # each parameter once
        {"CHUNK": 64, "NEG_DELTA_TOKENS": 16},
        {"tile": 32, "SUM_ROWS": 16, "NARROW": 0},
        {"SUM_ROWS_OF_NARROW": 64, "ACCUMULATE_BLOCK": 64},
    ],
)
def test_any_tuning(tuning, monkeypatch):
    tune(monkeypatch, **tuning)
    check(draw(LONG if ON_GPU else 70, batch=FEW))  # several chunks for every chunk size


@needs_gpu
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 12), (1, 16)])
def test_numbers_of_heads(batch, heads):
    check(draw(500, batch=batch, heads=heads))


@pytest.mark.parametrize("batch", cases(every=[1, 2], default=[2]))
def test_batch_first_and_sequence_first(batch):
    tensors = draw(LONG, batch=batch)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    results = run(tensors, "triton"), run(turned, "triton")
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[1][0].transpose(0, 1).is_contiguous()


def test_any_strides():
    tensors = draw(LONG, batch=FEW)
    apart = [torch.stack([x, x], -1)[..., 0] for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(run(tensors, "triton"), run(apart, "triton"), strict=True))


def test_large_inputs_stay_finite():
    tensors = [10 * x for x in draw(LONG, batch=FEW, dtype=FP16 if ON_GPU else FP32)]
    check(tensors)


def test_recomputation_gives_the_same_gradients():
    *inputs, dout = draw(LONG, batch=FEW)
    gradients = []
    for recompute in (False, True):
        q, k, v = [x.detach().requires_grad_() for x in inputs]
        call = lambda *args: based(*args, implementation="triton")  # noqa: E731
        out = checkpoint(call, q, k, v, use_reentrant=False) if recompute else call(q, k, v)
        gradients.append(torch.autograd.grad(out, [q, k, v], dout))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_two_runs_are_bitwise_equal():
    tensors = draw(5000 if ON_GPU else LONG, batch=FEW)
    assert all(torch.equal(a, b) for a, b in zip(run(tensors, "triton"), run(tensors, "triton"), strict=True))


@needs_gpu
def test_states_beyond_32_bits(monkeypatch):
    tune(monkeypatch, CHUNK=32, tile=32)
    tensors = [torch.randn(1, 55_000, 128, size, device=DEVICE, dtype=BF16) for size in (16, 16, 64, 64)]
    assert 128 * (55_000 / 32) * 153 * 65 > 2**31
    whole, last = run(tensors, "triton"), run([x[:, :, -1:] for x in tensors], "triton")
    assert all(torch.equal(a[:, :, -1:], b) for a, b in zip(whole, last, strict=True))


@needs_gpu
def test_auto_chooses_triton_or_logs_the_reason():
    tensors = draw(10)[:3]
    assert torch.equal(based(*tensors), based(*tensors, implementation="triton"))
    with pytest.raises(ValueError, match=r"^implementation is 'triton', but q has dtype torch.float32, which "):
        based(*draw(10, dtype=FP32)[:3], implementation="triton")


@pytest.mark.skipif(ON_GPU, reason="says what stands in the way elsewhere")
@pytest.mark.parametrize(("width", "value", "message"), [(33, 4, "q has head_dim 33: give at most 32"),
                                                      (4, 257, "v has head_dim 257: give at most 256")])  # fmt: skip
def test_wide_heads_raise(width, value, message):
    q, v = (torch.zeros(1, 1, 1, size) for size in (width, value))
    with pytest.raises(ValueError, match=f"^implementation is 'triton', but {message}$"):
        based(q, q, v, implementation="triton")
