"""Selective scan, compared with a float64 loop over channels and tokens and with finite differences."""

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from kernels.selective_scan import reference, selective_scan

FORMS = ["recurrent", "chunked"]
BATCH, CHANNELS, SIZE = 2, 4, 3


def brute_force(x, dt, A, B, C, D=None, state=None):
    """Scan each channel separately with numpy."""
    batch, length, channels = x.shape
    x, dt, A, B, C = (y.detach().double().numpy() for y in (x, dt, A, B, C))
    if B.ndim == 3:
        B, C = B[:, :, None], C[:, :, None]
    y = np.zeros(x.shape) if D is None else x * D.detach().double().numpy()
    last = np.zeros((batch, *A.shape)) if state is None else state.detach().double().numpy().copy()
    for b, i in np.ndindex(batch, channels):
        group = i * B.shape[2] // channels
        for t in range(length):
            last[b, i] = np.exp(dt[b, t, i] * A[i]) * last[b, i] + dt[b, t, i] * B[b, t, group] * x[b, t, i]
            y[b, t, i] += C[b, t, group] @ last[b, i]
    return torch.from_numpy(y), torch.from_numpy(last)


def inputs(length, groups=None, dtype=torch.float64, step=1.0, batch=BATCH, channels=CHANNELS, size=SIZE, seed=0):
    """Draw x, dt, A, B, C. With `groups=None`, B and C have no group dimension."""
    gen = torch.Generator().manual_seed(seed)
    inner = (length, size) if groups is None else (length, groups, size)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    fine = torch.float64 if dtype == torch.float64 else torch.float32
    x, dt, A = (
        draw(batch, length, channels),
        step * softplus(draw(batch, length, channels)),
        -draw(channels, size).exp(),
    )
    return x.to(dtype), dt.to(fine), A.to(fine), draw(batch, *inner).to(dtype), draw(batch, *inner).to(dtype)


def skip_and_state(channels=CHANNELS, size=SIZE, batch=BATCH):
    gen = torch.Generator().manual_seed(7)
    return tuple(torch.randn(*s, generator=gen, dtype=torch.float64) for s in [(channels,), (batch, channels, size)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 37])
@pytest.mark.parametrize("groups", [None, 1, 2])
@pytest.mark.parametrize("with_rest", [False, True])
def test_matches_the_loop(form, length, groups, with_rest):
    arguments = inputs(length, groups)
    skip, state = skip_and_state() if with_rest else (None, None)
    options = {"D": skip, "initial_state": state, "output_final_state": True, "implementation": form}
    y, last = selective_scan(*arguments, **options)
    expected, expected_last = brute_force(*arguments, skip, state)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(last, expected_last, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_close_and_keeps_its_dtype(form, dtype):
    arguments, (skip, _) = inputs(50, 2, dtype), skip_and_state()
    y, last = selective_scan(*arguments, D=skip, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments, skip)
    assert (y.dtype, last.dtype) == (dtype, torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    # The state stays in fp32, whatever the dtype of the inputs.
    torch.testing.assert_close(last.double(), expected_last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 16, 36])
def test_state_carries_over_between_two_parts(form, cut):
    x, dt, A, B, C = inputs(37, 2)
    options = {"D": skip_and_state()[0], "output_final_state": True, "implementation": form}
    whole, last = selective_scan(x, dt, A, B, C, **options)
    left, state = selective_scan(x[:, :cut], dt[:, :cut], A, B[:, :cut], C[:, :cut], **options)
    right, right_last = selective_scan(
        x[:, cut:], dt[:, cut:], A, B[:, cut:], C[:, cut:], initial_state=state, **options
    )
    torch.testing.assert_close(torch.cat([left, right], dim=1), whole, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(right_last, last, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 5, 18])
def test_gradient_by_finite_differences(form, length):
    small = {"batch": 1, "channels": 2, "size": 2}
    arguments = [*inputs(length, 2, **small), *skip_and_state(**small)]

    def op(x, dt, A, B, C, skip, state):
        return selective_scan(x, dt, A, B, C, D=skip, initial_state=state, output_final_state=True, implementation=form)

    assert torch.autograd.gradcheck(op, [x.requires_grad_() for x in arguments])


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("step", [0.0, 1.0, 1000.0])
def test_implementations_have_equal_finite_gradients_in_fp32(groups, step):
    gradients = []
    for form in FORMS:
        arguments = [x.requires_grad_() for x in inputs(37, groups, torch.float32, step)]
        # Step sizes near 0 or 1000 give states near 0 or near 1000.
        y, last = selective_scan(*arguments, output_final_state=True, implementation=form)
        gradients.append(torch.autograd.grad(y.sin().sum() + last.cos().sum(), arguments))
    for name, a, b in zip(["x", "dt", "A", "B", "C"], *gradients, strict=True):
        assert a.isfinite().all(), name
        scale = float(a.abs().max())
        torch.testing.assert_close(a, b, rtol=2e-3, atol=max(1e-5, 2e-3 * scale), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("form", FORMS)
def test_strong_decay_stays_finite(form):
    x, _, _, B, C = inputs(37, dtype=torch.float32)
    dt, A = torch.full_like(x, 5.0).requires_grad_(), torch.full((CHANNELS, SIZE), -10.0).requires_grad_()
    y, _ = selective_scan(x, dt, A, B, C, implementation=form)
    # Earlier tokens decay to nothing, so each token reads only its own update.
    torch.testing.assert_close(y, 5.0 * x * (B * C).sum(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    for gradient in torch.autograd.grad(y.sum(), (dt, A)):
        assert gradient.isfinite().all()


def test_memory_saved_for_the_backward_pass():
    arguments = [x.requires_grad_() for x in inputs(160, dtype=torch.float32)]
    held = {}

    def hold(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
        return x

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        y, _ = selective_scan(*arguments, implementation="chunked")
    numbers = sum(held.values()) - sum(held.get(x.untyped_storage().data_ptr(), 0) for x in arguments)
    assert 0 < numbers <= BATCH * CHANNELS * SIZE * 160 / 16
    assert y.requires_grad


def test_without_a_backward_pass_nothing_is_checkpointed(monkeypatch):
    x, dt, A, B, C = inputs(40)
    expected, _ = selective_scan(x, dt, A, B, C, implementation="chunked")
    monkeypatch.setattr(reference, "checkpoint", None)  # importing checkpoint loads torch's compiler
    with torch.no_grad():
        found, _ = selective_scan(x, dt, A, B, C, implementation="chunked")
    assert torch.equal(found, expected)


def test_auto_under_autocast():
    arguments = inputs(37, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = selective_scan(*arguments)
    assert state is None
    torch.testing.assert_close(y.double(), brute_force(*arguments)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 9)}, r"x has shape \[2, 9\]"),
        ({"x": torch.zeros(2, 0, 4)}, r"x has shape \[2, 0, 4\]"),
        ({"x": torch.zeros(2, 9, 4, dtype=torch.int64)}, "x has dtype torch.int64"),
        ({"dt": torch.zeros(2, 9, 3)}, r"dt has shape \[2, 9, 3\]: give \[2, 9, 4\]"),
        ({"dt": torch.zeros(2, 9, 4, dtype=torch.bfloat16)}, "dt has dtype torch.bfloat16"),
        ({"A": torch.zeros(4)}, r"A has shape \[4\]"),
        ({"A": torch.zeros(5, 3)}, r"A has shape \[5, 3\]: give \[4, 3\]"),
        ({"A": torch.zeros(4, 3, dtype=torch.float16)}, "A has dtype torch.float16"),
        ({"B": torch.zeros(2, 9, 3, 3)}, "B has 3 groups: give a number that divides the 4 channels of x"),
        ({"B": torch.zeros(2, 9, 5)}, r"B has shape \[2, 9, 5\]: give \[2, 9, 3\]"),
        ({"C": torch.zeros(2, 9, 2, 3)}, r"C has shape \[2, 9, 2, 3\]: give \[2, 9, 3\]"),
        ({"C": torch.zeros(2, 9, 3, dtype=torch.bool)}, "C has dtype torch.bool"),
        ({"D": torch.zeros(3)}, r"D has shape \[3\]: give \[4\]"),
        ({"D": torch.zeros(4, device="meta")}, "D is on meta but x is on cpu"),
        ({"initial_state": torch.zeros(2, 3, 4)}, "initial_state has shape"),
        ({"implementation": "mamba_ssm"}, "implementation is 'mamba_ssm'"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip(["x", "dt", "A", "B", "C"], inputs(9, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        selective_scan(**arguments)
