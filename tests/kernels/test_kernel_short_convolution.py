"""Short convolution: plain torch compared with torch's conv1d, the Triton kernels with plain torch in float64.

The kernels run on a GPU, or in Triton's interpreter.
"""

import logging

import pytest
import torch
import torch.nn.functional as F
from covering import cases, kernel_cases
from torch.utils.checkpoint import checkpoint
from triton_cases import BF16, DEVICE, FP16, FP32, ON_GPU, TOLERANCE, needs_gpu, poison, relative_rms

from kernels.common.dispatch import HAS_TRITON
from kernels.short_convolution import short_convolution

__all__ = ["poison"]  # imported as a fixture

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
pytestmark = pytest.mark.usefixtures("poison")

NAMES = ["x", "before", "weight", "bias"]
HEADS = {"widths": [6, 6, 4], "unit_length": [True, True, False]}


def draw(length, *, taps=4, batch=2, units=3, width=16, dtype=FP32):
    """Draw all tensors of a call in the order of NAMES. x is a view into wider rows."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen).to(DEVICE, dtype)

    x = normal(length, batch, units, width + 8)[..., 8:]
    return [x, normal(taps - 1, batch, units, width), normal(units, width, taps), normal(units, width)]


def run(tensors, implementation, dtype=FP32, **options):
    """Return the parts, and the gradients of the inputs for random upstream gradients rounded to `dtype`."""
    inputs = [y.detach().requires_grad_() for y in tensors]
    parts = short_convolution(*inputs, implementation=implementation, **options)
    gen = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=gen).to(dtype).to(tensors[0]) for y in parts]
    return *parts, *torch.autograd.grad(parts, inputs, upstream)


def check(tensors, **options):
    """Compare parts and gradients with plain torch in float64, and check their dtypes."""
    parts, dtype = len(options["widths"]), tensors[0].dtype
    actual = run(tensors, "triton", dtype, **options)
    expected = run([y.double() for y in tensors], "reference", dtype, **options)
    dtypes = [dtype] * parts + [y.dtype for y in tensors]
    for name, dtype, a, b in zip([*map(str, range(parts)), *NAMES], dtypes, actual, expected, strict=False):
        assert a.dtype == dtype, name
        assert a.shape == b.shape, name
        assert a.numel() == 0 or relative_rms(a, b) < TOLERANCE[dtype], name
    assert all(y.is_contiguous() for y in actual[:parts])


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_reference_matches_torch_convolution(length, taps):
    inputs = [y.double().requires_grad_() for y in draw(length, taps=taps)]
    x, before, weight, bias = inputs
    channels = torch.cat([before, x]).flatten(2).permute(1, 2, 0)
    expected = F.silu(F.conv1d(channels, weight.flatten(0, 1)[:, None], bias.flatten(), groups=48))
    expected = expected.transpose(1, 2).unflatten(2, (3, 16))
    (found,) = short_convolution(*inputs, widths=[16], implementation="reference")
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, dtype=torch.float64, device=DEVICE)
    for a, b in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_parts_of_unit_length():
    tensors = draw(5)
    (whole,) = short_convolution(*tensors, widths=[16])
    q, k, v = short_convolution(*tensors, **HEADS)
    torch.testing.assert_close(q, F.normalize(whole[..., :6], dim=-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k, F.normalize(whole[..., 6:12], dim=-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v, whole[..., 12:])


def test_zero_vector_stays_zero():
    tensors = [torch.zeros_like(y) for y in draw(3)]
    assert all((y == 0).all() for y in short_convolution(*tensors, **HEADS))


def test_rows_before_continue_a_sequence():
    x, before, weight, bias = draw(9)
    (whole,) = short_convolution(x, before, weight, bias, widths=[16])
    (first,) = short_convolution(x[:5], before, weight, bias, widths=[16])
    (others,) = short_convolution(x[5:], x[2:5], weight, bias, widths=[16])
    torch.testing.assert_close(torch.cat([first, others], 1), whole)


LENGTHS = [1, 2, 63, 130, 1000, 4099] if ON_GPU else cases(every=[1, 2, 37, 70, 130], default=[1, 2, 70])


@needs_triton
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16] if ON_GPU else [FP32])
def test_kernels_agree(length, dtype):
    few = {} if length < 64 else {"batch": 1} if ON_GPU else {"batch": 1, "units": 1}
    check(draw(length, dtype=dtype, **few), **HEADS)


@needs_triton
@pytest.mark.parametrize("taps", kernel_cases(every=[1, 2, 3, 8], default=[1, 8]))
def test_taps(taps):
    check(draw(37, taps=taps, batch=1, units=1), **HEADS)


@needs_triton
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bits(dtype):
    check(draw(35, dtype=dtype, batch=1, units=3 if ON_GPU else 1), **HEADS)


@needs_triton
@pytest.mark.parametrize(
    ("units", "widths", "unit_length"),
    [
        (1, [300], None),
        (9, [20], [True]),
        (2, [200, 8, 1], [True, False, False]),
        (16, [16, 16], None),
        (5, [64, 64, 128], [True, True, False]),
        (1, [256, 700], [True, False]),
    ],
)
def test_tiles_of_a_row(units, widths, unit_length):
    check(draw(1000 if ON_GPU else 5, units=units, width=sum(widths), batch=1), widths=widths, unit_length=unit_length)


@needs_triton
def test_without_bias():
    *tensors, _ = draw(9)
    check(tensors, **HEADS)


@needs_triton
def test_weights_of_another_dtype():
    x, before, weight, bias = draw(9, dtype=FP16)
    tensors = [x, before, weight.float(), bias.float()]
    check(tensors, **HEADS)


@needs_triton
def test_rows_of_any_strides():
    x, before, weight, bias = draw(9)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    spread = torch.stack([weight, weight], 1)[:, 0]
    later = torch.stack([before, before], 2)[:, :, 0]
    for a, b in zip(
        run([turned, later, spread, bias], "triton", **HEADS), run([x, before, weight, bias], "triton", **HEADS),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)


@needs_triton
def test_unused_part():
    gradients = []
    for form in ("triton", "reference"):
        tensors = [y.detach().requires_grad_() for y in draw(9)]
        _, k, _ = short_convolution(*tensors, implementation=form, **HEADS)
        gradients.append(torch.autograd.grad(k.transpose(1, 2).sin().sum(), tensors))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_triton
def test_two_runs_are_bitwise_equal():
    tensors = draw(1000 if ON_GPU else 37, dtype=BF16, batch=1, units=3 if ON_GPU else 1)
    first, second = (run(tensors, "triton", **HEADS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_triton
def test_recomputation_gives_the_same_gradients():
    tensors = [y.detach().requires_grad_() for y in draw(9)]

    def norm(*inputs):
        return sum(y.sin().sum() for y in short_convolution(*inputs, implementation="triton", **HEADS))

    plain = torch.autograd.grad(norm(*tensors), tensors)
    repeated = torch.autograd.grad(checkpoint(norm, *tensors, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, repeated, strict=True))


@needs_triton
@pytest.mark.parametrize("biased", [True, False])
def test_operators_pass_opcheck(biased):
    from kernels.short_convolution.op import backward_operator, forward_operator

    *tensors, bias = draw(3, units=1)
    inputs = (*tensors, bias if biased else None)
    torch.library.opcheck(forward_operator, (*inputs, *HEADS.values()))
    gradients = [torch.ones(2, 3, 1, width, device=DEVICE) for width in HEADS["widths"]]
    torch.library.opcheck(backward_operator, (gradients, *inputs, HEADS["unit_length"]))


@needs_triton
def test_compiles_without_a_graph_break():
    def total(*inputs):
        return sum(y.sin().sum() for y in short_convolution(*inputs, implementation="triton", **HEADS))

    results = []
    for function in (total, torch.compile(total, backend="aot_eager", fullgraph=True)):
        tensors = [y.detach().requires_grad_() for y in draw(5)]
        results.append([function(*tensors), *torch.autograd.grad(function(*tensors), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_triton
def test_second_derivative_raises():
    tensors = [y.detach().requires_grad_() for y in draw(2)]
    parts = short_convolution(*tensors, implementation="triton", **HEADS)
    (dx,) = torch.autograd.grad(parts[0].square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@needs_gpu
def test_more_elements_than_int32_holds():
    length, width, last = 2**19 + 100, 4128, 200
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.randn(length, 1, 1, width, device=DEVICE, dtype=BF16)
    before, weight = torch.zeros_like(x[:3]), torch.randn(1, width, 4, device=DEVICE, dtype=BF16)
    results = []
    for rows, dtype, form in ((x, BF16, "triton"), (x[-last - 3 :], torch.float64, "reference")):
        inputs = [y.detach().to(dtype).requires_grad_() for y in (rows, before, weight)]
        (y,) = short_convolution(*inputs, widths=[width], implementation=form)
        dy = torch.zeros_like(y)
        dy[:, -last:] = x[-last:].transpose(0, 1)
        dx, _, dweight = torch.autograd.grad(y, inputs, dy)
        results.append((y[:, -last:].detach(), dx[-last:], dweight))
    for name, actual, expected in zip(["y", "x", "weight"], *results, strict=True):
        assert relative_rms(actual, expected) < TOLERANCE[BF16], name


def test_auto_chooses_triton_only_on_a_gpu(caplog):
    caplog.set_level(logging.DEBUG, logger="kernels.common.dispatch")
    short_convolution(*draw(5), **HEADS)
    assert f"short_convolution: {'triton' if ON_GPU else 'reference'}" in caplog.text
    caplog.clear()
    short_convolution(*draw(5, taps=9), **HEADS)
    assert "short_convolution: reference" in caplog.text
    assert ("weight has 9 taps" in caplog.text) == ON_GPU


@needs_triton
def test_unsupported_triton_inputs_raise(monkeypatch):
    def refuse(message, tensors, **options):
        with pytest.raises(ValueError, match=f"implementation is 'triton', but {message}"):
            short_convolution(*tensors, implementation="triton", **(HEADS | options))

    tensors = x, before, weight, bias = draw(5)
    refuse("x has dtype torch.float64: convert it to one of", [y.double() for y in tensors])
    refuse("bias has dtype torch.float64: convert it to one of", [x, before, weight, bias.double()])
    refuse("x has stride 2 in its last dimension", [x.repeat_interleave(2, -1)[..., ::2], before, weight, bias])
    refuse("weight has 9 taps: give at most 8", draw(5, taps=9))
    wide = {"widths": [300, 3], "unit_length": [True, False]}
    refuse("widths has a normalised part of width 300: give at most 256", draw(5, width=303), **wide)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refuse("x is on cpu: move it to a GPU", [y.cpu() for y in tensors])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 2, 16)}, r"x has shape \[5, 2, 16\]: give \[length, batch, units, width\]"),
        ({"x": torch.zeros(0, 2, 3, 16)}, r"x has shape \[0, 2, 3, 16\]: give .* all at least 1"),
        ({"weight": torch.zeros(48, 4)}, r"weight has shape \[48, 4\]: give \[units, width, taps\]"),
        ({"weight": torch.zeros(3, 15, 4)}, r"weight has shape \[3, 15, 4\]: give \[3, 16, 4\], to match x"),
        ({"weight": torch.zeros(3, 16, 4).long()}, "weight has dtype torch.int64"),
        ({"before": torch.zeros(4, 2, 3, 16)}, r"before has shape \[4, 2, 3, 16\]: give \[3, 2, 3, 16\]"),
        ({"before": torch.zeros(3, 2, 3, 16, dtype=BF16)}, "before has dtype torch.bfloat16 but x has torch.float32"),
        ({"bias": torch.zeros(16)}, r"bias has shape \[16\]: give \[3, 16\]"),
        ({"bias": torch.zeros(3, 16, device="meta")}, "bias is on meta but x is on cpu"),
        ({"widths": [8, 7]}, r"widths is \[8, 7\]: give whole numbers from 1 that sum to 16, the width of x"),
        ({"widths": [17, -1]}, r"widths is \[17, -1\]"),
        ({"widths": []}, r"widths is \[\]"),
        ({"unit_length": [True]}, r"unit_length is \[True\]: give a bool for each of the 3 widths"),
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip(NAMES, (y.cpu() for y in draw(5)), strict=True)) | HEADS | change
    with pytest.raises(ValueError, match=message):
        short_convolution(**arguments)
