"""The selective scan's Triton kernels, compared with the float64 loop over tokens: on a GPU, or in the interpreter."""

import logging

import pytest
import torch
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint
from triton_cases import BF16, DEVICE, FP16, FP32, ON_GPU, TOLERANCE, needs_gpu, poison, relative_rms

pytest.importorskip("triton")

from kernels.selective_scan import selective_scan, triton_launch

# In the interpreter, masked lanes compute infinities and NaN with numpy, which warns about them.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poison")]

__all__ = ["poison"]  # imported as a fixture

NAMES = ["x", "dt", "A", "B", "C", "D", "initial_state"]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Reduce sizes in the interpreter, so that short sequences have several chunks, spans and partial sums of dB."""
    if not ON_GPU:
        small = {"span": 4, "step": 2, "least_chunk": 8, "backward_elements": 4, "parts": 2}
        monkeypatch.setattr(triton_launch, "TUNING", triton_launch.TUNING._replace(**small))
        monkeypatch.setattr(triton_launch, "JOIN_AHEAD", 2)


def draw(length, channels=12, size=4, groups=None, batch=1, dtype=FP32, step=1.0):
    """Draw all tensors of a call in the order of NAMES, and gradients of the output and of the final state."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen).to(DEVICE)

    inner = (length, size) if groups is None else (length, groups, size)
    shapes = [(length, channels), inner, inner, (length, channels)]
    x, B, C, dy = (normal(batch, *shape).to(dtype) for shape in shapes)
    dt = step * softplus(normal(batch, length, channels))
    state, dlast = (normal(batch, channels, size) for _ in range(2))
    return [x, dt, -normal(channels, size).exp(), B, C, normal(channels), state, dy, dlast]


def run(tensors, implementation, *, others=True):
    """Return the output, the final state and the gradients. Without `others`, there is no skip and no initial state."""
    *tensors, dy, dlast = tensors
    inputs = [x.detach().requires_grad_() for x in (tensors if others else tensors[:5])]
    options = dict(zip(["D", "initial_state"], inputs[5:], strict=False))
    y, last = selective_scan(*inputs[:5], output_final_state=True, implementation=implementation, **options)
    return y, last, *torch.autograd.grad((y, last), inputs, (dy, dlast))


def check(tensors, **options):
    """Compare all results with the loop's, and return them."""
    actual = run(tensors, "triton", **options)
    expected = run([x.double() for x in tensors], "recurrent", **options)
    dtypes = [tensors[0].dtype, FP32, *(x.dtype for x in tensors)]
    for name, dtype, a, b in zip(["y", "last state", *NAMES], dtypes, actual, expected, strict=False):
        assert a.dtype == dtype, name
        assert a.shape == b.shape, name
        assert relative_rms(a, b) < TOLERANCE[dtype], name
    return actual


CASES = [(1, 5, 16), (7, 12, 4), (33, 12, 16), (17, 40, 1), (9, 9, 64), (24, 16, 16)]
if ON_GPU:
    CASES += [(1000, 192, 16), (2049, 64, 16), (300, 33, 64), (300, 100, 1), (129, 1536, 8), (500, 70, 32)]


@pytest.mark.parametrize(("length", "channels", "size"), CASES)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16] if ON_GPU else [FP32])
def test_agrees_with_the_loop(length, channels, size, dtype):
    check(draw(length, channels, size, batch=2 if ON_GPU or length < 30 else 1, dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bits(dtype):
    check(draw(21, dtype=dtype))


@pytest.mark.parametrize("groups", [1, 3])
def test_groups_of_channels(groups):
    check(draw(18, channels=12 * groups, groups=groups))


def test_without_skip_and_first_state():
    check(draw(18), others=False)


def test_one_chunk(monkeypatch):
    monkeypatch.setattr(triton_launch, "TUNING", triton_launch.TUNING._replace(alone=0))
    check(draw(18, batch=2))


def test_sequence_first():
    tensors = draw(18, batch=2)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors[:2]] + tensors[2:]
    results = run(turned, "triton")
    for a, b in zip(results, run(tensors, "triton"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert results[0].stride() == turned[0].stride()


def test_step_of_zero_keeps_the_state():
    tensors = draw(18)
    tensors[1].zero_()
    _, last, *_ = check(tensors)
    assert torch.equal(last, tensors[6])


def test_strong_decay_stays_finite():
    tensors = draw(18)
    tensors[1].fill_(100.0)
    tensors[2].fill_(-100.0)
    check(tensors)


def test_gradient_of_the_final_state_alone():
    tensors = [x.requires_grad_() for x in draw(18)[:5]]
    gradients = []
    for form in ("triton", "recurrent"):
        _, last = selective_scan(*tensors, output_final_state=True, implementation=form)
        gradients.append(torch.autograd.grad(last.sin().sum(), tensors, materialize_grads=True))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_recomputation_gives_the_same_gradients():
    tensors = [x.requires_grad_() for x in draw(18)[:5]]

    def two_calls(*inputs):  # as with context parallelism: one call's final state is the next one's initial state
        _, state = selective_scan(*inputs, output_final_state=True, implementation="triton")
        return selective_scan(*inputs, initial_state=state, implementation="triton")[0]

    plain = torch.autograd.grad(two_calls(*tensors).sum(), tensors)
    repeated = torch.autograd.grad(checkpoint(two_calls, *tensors, use_reentrant=False).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, repeated, strict=True))


def test_second_derivative_raises():
    tensors = [x.requires_grad_() for x in draw(5)[:5]]
    y, state = selective_scan(*tensors, implementation="triton")
    assert state is None
    (dx,) = torch.autograd.grad(y.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_two_runs_are_bitwise_equal():
    tensors = draw(1000 if ON_GPU else 18, channels=100 if ON_GPU else 12, dtype=BF16)
    first, second = (run(tensors, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_states_are_saved_without_gradients():
    tensors = draw(18)
    with torch.no_grad():
        y, _ = selective_scan(*tensors[:5], D=tensors[5], initial_state=tensors[6], implementation="triton")
    assert torch.equal(y, run(tensors, "triton")[0])
    rows = triton_launch.Rows(1, 18, 18, 1)
    B, C = (x[:, :, None] for x in tensors[3:5])
    assert triton_launch.forward(rows, False, *tensors[:3], B, C, *tensors[5:7])[2].numel() == 0


@needs_gpu
def test_more_elements_than_int32_holds():
    length, channels, size = 2**19 + 100, 4128, 100
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of GPU memory")
    x = torch.randn(1, length, channels, device=DEVICE, dtype=BF16)
    dt = torch.full((1, length, channels), 0.5, device=DEVICE)
    A = -torch.ones(channels, 4, device=DEVICE)
    B, C = (torch.randn(1, length, 4, device=DEVICE, dtype=BF16) for _ in range(2))
    # Tokens further back than twice the compared range have decayed to nothing.
    ends = [z[:, -2 * size :].double().requires_grad_() for z in (x, dt, B, C)]
    tensors = [z.requires_grad_() for z in (x, dt, B, C)]
    results = []
    for form, (x, dt, B, C) in (("triton", tensors), ("recurrent", ends)):
        y, _ = selective_scan(x, dt, A.to(dt.dtype), B, C, implementation=form)
        dy = torch.zeros_like(y)
        dy[:, -size:] = C[:, -size:, :1].detach()
        results.append([z[:, -size:].detach() for z in (y, *torch.autograd.grad(y, (x, dt, B, C), dy))])
    for name, actual, expected in zip(["y", "x", "dt", "B", "C"], *results, strict=True):
        assert relative_rms(actual, expected) < TOLERANCE[BF16], name


def test_auto_chooses_triton_only_on_a_gpu(caplog):
    caplog.set_level(logging.DEBUG, logger="kernels.common.dispatch")
    tensors = draw(5)[:5]
    selective_scan(*tensors)
    assert f"selective_scan: {'triton' if ON_GPU else 'chunked'}" in caplog.text
    caplog.clear()
    selective_scan(*draw(5, size=3)[:5])
    assert "selective_scan: chunked" in caplog.text
    assert ("A has state size 3" in caplog.text) == ON_GPU


def test_unsupported_triton_inputs_raise(monkeypatch):
    def refuse(message, tensors):
        with pytest.raises(ValueError, match=f"implementation is 'triton', but {message}"):
            selective_scan(*tensors, implementation="triton")

    x, dt, A, B, C = draw(5)[:5]
    refuse("x has dtype torch.float64: convert it to one of", [y.double() for y in (x, dt, A, B, C)])
    refuse("B has dtype torch.float64: convert it to one of", [x, dt, A, B.double(), C])
    refuse("dt has dtype torch.float64: convert it to torch.float32", [x, dt.double(), A, B, C])
    refuse("A has state size 3: give a power of two up to 64", draw(5, size=3)[:5])
    refuse("A has state size 128: give a power of two up to 64", draw(5, size=128)[:5])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refuse("x is on cpu: move it to a GPU", [y.cpu() for y in (x, dt, A, B, C)])
