"""The gated delta rule's Triton kernels, compared with plain torch in float64: on a GPU, or in the interpreter."""

import itertools

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize
from torch.utils.checkpoint import checkpoint
from triton_cases import BF16, DEVICE, FEW, FP16, FP32, ON_GPU, TOLERANCE, needs_gpu, poison, relative_rms

pytest.importorskip("triton")

from kernels.gated_delta_rule import gated_delta_rule, triton_launch

# In the interpreter, masked lanes compute infinities and NaN with numpy, which warns about them.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poison")]

__all__ = ["poison"]  # imported as a fixture

NAMES = ["q", "k", "v", "g", "beta", "initial_state"]
DTYPE = BF16 if ON_GPU else FP32
"""The kernels do not support fp32 on a GPU."""


KEY, VALUE, HEADS = (64, 64, 3) if ON_GPU else (16, 24, 2)


def draw(length, key=KEY, value=VALUE, batch=2, heads=HEADS, dtype=DTYPE, forget=0.6):
    """Draw all tensors of a call in the order of NAMES, and gradients of the output and of the final state.

    Args:
        forget: factor of the log decays. None: no decay.
    """
    gen = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(batch, length, heads, *shape, generator=gen).to(DEVICE)

    q, k, v, dout = normal(key), normalize(normal(key), dim=-1), normal(value), normal(value)
    g = None if forget is None else forget * logsigmoid(normal())
    q, k, v, beta, dout = (x.to(dtype) for x in (q, k, v, normal().sigmoid(), dout))
    state, dlast = (torch.randn(batch, heads, key, value, generator=gen).to(DEVICE) for _ in range(2))
    return [q, k, v, g, beta, state, dout, dlast]


def run(tensors, implementation, **options):
    """Return the output, the final state and the gradients of the inputs that are not None."""
    *inputs, dout, dlast = [None if x is None else x.detach().requires_grad_() for x in tensors]
    results = gated_delta_rule(
        *inputs[:5], initial_state=inputs[5], output_final_state=True, implementation=implementation, **options
    )
    return *results, *torch.autograd.grad(results, [x for x in inputs if x is not None], (dout, dlast))


def check(tensors, least=1e-12, times=1, **options):
    """Compare the outputs and all gradients with plain torch.

    Args:
        least: lower bound of the RMS that errors are relative to.
        times: factor of the tolerance, for cases that magnify 16-bit rounding.
    """
    actual = run(tensors, "triton", **options)
    expected = run([None if x is None else x.double() for x in tensors], "chunked", **options)
    given = {name: x for name, x in zip(NAMES, tensors, strict=False) if x is not None}
    dtypes = [tensors[2].dtype, FP32, *(x.dtype for x in given.values())]
    for name, dtype, a, b in zip(["o", "last state", *given], dtypes, actual, expected, strict=True):
        assert a.dtype == dtype, name
        assert a.shape == b.shape, name
        error = relative_rms(a, b, least)
        assert error < times * TOLERANCE[tensors[0].dtype], f"{name}: {error:.1e}"


if ON_GPU:
    LENGTHS, FORGET, ALONE = [1, 63, 200, 1000, 8000], [None, 0.6], [False, True]
    SIZES = [(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (100, 40)]
    CASES = [(t, *size, *more) for t in LENGTHS for size in SIZES for more in itertools.product(FORGET, ALONE)]
else:
    CASES = [(1, 16, 16, 0.6), (1, 20, 40, None), (64, 16, 16, None), (64, 20, 40, 0.6), (150, 16, 16, None)]
    CASES = [(*case, False) for case in [*CASES, (150, 20, 40, 0.6)]]


@pytest.mark.parametrize(("length", "key", "value", "forget", "alone"), CASES)
def test_matches_plain_torch(length, key, value, forget, alone, monkeypatch):
    monkeypatch.setattr(triton_launch, "multiprocessors", lambda _: 10**9 if alone else 0)
    # With one token, beta and g have only one number per head. A large batch makes their relative RMS meaningful.
    check(draw(length, key, value, batch=2 if length > 1 else 100 if ON_GPU else 4, forget=forget))


@pytest.mark.parametrize(("dtype", "forget"), [(BF16, 0.6), (FP16, 0.6), (FP16, None)])
def test_16_bits(dtype, forget):
    check(draw(70, batch=FEW, dtype=dtype, forget=forget))


def test_dimensions_in_several_blocks(monkeypatch):
    monkeypatch.setattr(triton_launch, "multiprocessors", lambda _: 0)
    for name in ("MULTIPLY", "SCAN", "READ", "WRITE_GRADIENTS"):
        monkeypatch.setattr(triton_launch, name, getattr(triton_launch, name)._replace(block=16, inner=16))
    check(draw(70, 40, 40, batch=FEW))


@needs_gpu
@pytest.mark.parametrize("heads", [1, 12, 16])
@pytest.mark.parametrize("size", [64, 128])
def test_numbers_of_heads(heads, size):
    check(draw(500, size, size, batch=1, heads=heads))


def test_scale():
    check(draw(70, batch=FEW), scale=0.3)


@pytest.mark.parametrize("forget", [0.0, 1e-4, 50.0])
def test_any_decay(forget):
    # If the state decays at once, the gradient of g is close to zero: a difference of terms that cancel.
    check(draw(130, batch=FEW, forget=forget), least=0.1)


def test_equal_keys():
    tensors = draw(130, batch=FEW, forget=None)
    tensors[1] = tensors[1][:, :1].expand_as(tensors[1])
    tensors[4] = torch.full_like(tensors[4], 0.99)
    # Updates are differences of nearly equal values, which 16-bit rounding affects strongly.
    check(tensors, times=8 if ON_GPU else 1)


def test_beta_of_zero_writes_nothing():
    tensors = draw(70, batch=FEW)
    tensors[4].zero_()
    out, last, *gradients = run(tensors, "triton")
    assert all(x.isfinite().all() for x in (out, last, *gradients))
    expected, expected_last, *_ = run([x.double() for x in tensors], "chunked")
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE])
    torch.testing.assert_close(last.double(), expected_last, rtol=1e-5, atol=1e-5)


def test_any_strides_without_an_initial_state():
    tensors = draw(70)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:5]]
    out, state = gated_delta_rule(*turned, implementation="triton")
    assert state is None
    repeated = gated_delta_rule(
        *tensors[:5], initial_state=torch.zeros_like(tensors[5]), output_final_state=True, implementation="triton"
    )
    assert torch.equal(out, repeated[0])


def test_recomputation_gives_the_same_gradients():
    tensors = draw(70, batch=FEW)
    gradients = []
    for recompute in (False, True):
        q, *others = [x.detach().requires_grad_() for x in tensors[:5]]
        call = lambda q, *others: gated_delta_rule(q, *others, implementation="triton")[0]  # noqa: E731
        out = checkpoint(call, q, *others, use_reentrant=False) if recompute else call(q, *others)
        gradients.append(torch.autograd.grad(out, [q, *others], tensors[6]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_two_runs_are_bitwise_equal():
    tensors = draw(5000 if ON_GPU else 70, batch=FEW)
    assert all(torch.equal(a, b) for a, b in zip(run(tensors, "triton"), run(tensors, "triton"), strict=True))


@needs_gpu
def test_auto_chooses_triton_or_logs_the_reason():
    tensors = draw(10)
    assert torch.equal(gated_delta_rule(*tensors[:5])[0], gated_delta_rule(*tensors[:5], implementation="triton")[0])
    with pytest.raises(ValueError, match=r"^implementation is 'triton', but q has dtype torch.float32, for "):
        gated_delta_rule(*draw(10, dtype=FP32)[:5], implementation="triton")


@pytest.mark.skipif(ON_GPU, reason="says what stands in the way elsewhere")
def test_wide_keys_raise():
    tensors = [torch.zeros(1, 1, 1, *more) for more in ((257,), (257,), (4,), (), ())]
    with pytest.raises(ValueError, match=r"^implementation is 'triton', but q has head_dim 257: give at most 256$"):
        gated_delta_rule(*tensors, implementation="triton")
