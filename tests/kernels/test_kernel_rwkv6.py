"""RWKV-6's state update, compared with the paper's sum in float64 and with finite differences."""

import itertools

import numpy as np
import pytest
import torch
from covering import cases
from stateful_cases import first_state
from torch.nn.functional import logsigmoid

from kernels.gated_linear_attention import gated_linear_attention
from kernels.rwkv6 import rwkv6

FORMS = ["recurrent", "chunked"]
LENGTHS = [1, 2, 15, 16, 17, 50]


def brute_force(r, k, v, g, u, scale=1.0, state=None):
    """Compute o_t without a state.

    The output is the sum of v_s over s < t, with each feature decayed strictly between s and t, plus v_t weighted by u.
    """
    r, k, v, g, u = (x.double().numpy() for x in (r, k, v, g, u))
    batch, length, heads, dk = r.shape
    out, last = np.zeros(v.shape), np.zeros((batch, heads, dk, v.shape[3]))
    for b, h in np.ndindex(batch, heads):
        first = np.zeros((dk, v.shape[3])) if state is None else state[b, h].double().numpy()
        for t in range(length + 1):
            seen = np.exp(g[b, :t, h].sum(0))[:, None] * first
            for s in range(t):
                seen = seen + np.outer(np.exp(g[b, s + 1 : t, h].sum(0)) * k[b, s, h], v[b, s, h])
            if t == length:
                last[b, h] = seen
            else:
                out[b, t, h] = scale * r[b, t, h] @ (seen + np.outer(u[h] * k[b, t, h], v[b, t, h]))
    return torch.from_numpy(out), torch.from_numpy(last)


def inputs(length, heads=3, dk=6, dv=5, dtype=torch.float64, forget=1.0, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    shape = (2, length, heads)
    g = (forget * logsigmoid(draw(*shape, dk))).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return draw(*shape, dk).to(dtype), draw(*shape, dk).to(dtype), draw(*shape, dv).to(dtype), g, draw(heads, dk)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("with_state", [False, True])
def test_matches_the_papers_sum_without_a_scale(form, length, with_state):
    arguments = inputs(length)
    state = first_state() if with_state else None
    out, last = rwkv6(*arguments, initial_state=state, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_scale_changes_only_the_output(form):
    arguments, state = inputs(17), first_state()
    out, last = rwkv6(*arguments, scale=0.3, initial_state=state, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments, scale=0.3, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_read_precedes_the_decay(form):
    # Hand count with one feature: o_1 = r_1 (S_0 + u k_1 v_1) and S_1 = e^(g_1) S_0 + k_1 v_1.
    r, k, v = (torch.full((1, 1, 1, 1), x) for x in (2.0, 3.0, 5.0))
    g, u, state = torch.full((1, 1, 1, 1), 0.5).log(), torch.full((1, 1), 7.0), torch.full((1, 1, 1, 1), 11.0)
    out, last = rwkv6(r, k, v, g, u, initial_state=state, output_final_state=True, implementation=form)
    assert (out.item(), last.item()) == (2.0 * (11.0 + 7.0 * 15.0), 0.5 * 11.0 + 15.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_close_and_keeps_its_dtype(form, dtype):
    arguments = inputs(50, dtype=dtype)
    out, last = rwkv6(*arguments, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments)
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    tolerance = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    # The state stays in fp32, whatever the dtype of the inputs.
    torch.testing.assert_close(last.double(), expected_last, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 16, 33, 49])
def test_state_carries_over_between_two_parts(form, cut):
    *arguments, u = inputs(50)
    options = {"output_final_state": True, "implementation": form}
    whole, last = rwkv6(*arguments, u, **options)
    left, state = rwkv6(*(x[:, :cut] for x in arguments), u, **options)
    right, right_last = rwkv6(*(x[:, cut:] for x in arguments), u, initial_state=state, **options)
    torch.testing.assert_close(torch.cat([left, right], dim=1), whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(right_last, last, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_final_state_is_affine_in_the_initial_state(form):
    r, k, v, g, u = inputs(50)
    state, identity = first_state(), torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6)
    options = {"output_final_state": True, "implementation": form}
    wide_v = torch.cat([v, torch.zeros_like(k)], dim=-1)
    _, wide = rwkv6(r, k, wide_v, g, u, initial_state=torch.cat([torch.zeros_like(state), identity], dim=-1), **options)
    own, transition = wide.split([5, 6], dim=-1)
    _, last = rwkv6(r, k, v, g, u, initial_state=state, **options)
    torch.testing.assert_close(last, transition @ state + own, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(transition, g.sum(dim=1).exp().diag_embed(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("form", "length"),
    cases(
        every=itertools.product(FORMS, [1, 5, 18]),  # 18: two chunks
        default=[("recurrent", 5), ("chunked", 1), ("chunked", 18)],
    ),
)
def test_gradient_by_finite_differences(form, length):
    arguments = [x.requires_grad_() for x in inputs(length, heads=1, dk=2, dv=2)]
    state = first_state(1, 2, 2).requires_grad_()

    def op(r, k, v, g, u, state):
        return rwkv6(r, k, v, g, u, initial_state=state, output_final_state=True, implementation=form)

    assert torch.autograd.gradcheck(op, (*arguments, state))


@pytest.mark.parametrize("forget", [0.0, 1.0, 1000.0])
def test_implementations_have_equal_finite_gradients_in_fp32(forget):
    gradients = []
    for form in FORMS:
        arguments = [x.requires_grad_() for x in inputs(50, dtype=torch.float32, forget=forget)]
        state = first_state().requires_grad_()
        out, last = rwkv6(*arguments, initial_state=state, output_final_state=True, implementation=form)
        gradients.append(torch.autograd.grad(out.sin().sum() + last.sin().sum(), (*arguments, state)))
    for one, other in zip(*gradients, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_very_strong_decay_stays_finite(form):
    *arguments, g, u = inputs(50, dtype=torch.float32)
    g[..., ::2] = -60
    arguments = [x.requires_grad_() for x in (*arguments, g, u)]
    out, last = rwkv6(*arguments, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*(x.detach() for x in arguments))
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(last.double(), expected_last, rtol=2e-5, atol=2e-5)
    for gradient in torch.autograd.grad(out.sin().sum() + last.sin().sum(), arguments):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_linear_attention_as_special_case(form):
    r, k, v, g, u = inputs(50)
    options = {"initial_state": first_state(), "output_final_state": True}
    out, last = rwkv6(r, k, v, torch.zeros_like(g), torch.ones_like(u), **options, implementation=form)
    expected, expected_last = gated_linear_attention(r, k, v, scale=1.0, **options, implementation="recurrent")
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-10)


def test_auto_under_autocast():
    arguments = inputs(50, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = rwkv6(*arguments)
    assert state is None
    torch.testing.assert_close(out.double(), brute_force(*arguments)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": torch.zeros(2, 9)}, r"r has shape \[2, 9\]"),
        ({"r": torch.zeros(2, 0, 3, 6)}, r"r has shape \[2, 0, 3, 6\]"),
        ({"r": torch.zeros(2, 9, 3, 6, dtype=torch.int64)}, "r has dtype torch.int64"),
        ({"k": torch.zeros(2, 9, 3, 6, dtype=torch.bfloat16)}, "k has dtype torch.bfloat16 but r has torch.float32"),
        ({"k": torch.zeros(2, 9, 3, 4)}, r"k has shape \[2, 9, 3, 4\]"),
        ({"v": torch.zeros(2, 9, 15)}, r"v has shape \[2, 9, 15\]"),
        ({"v": torch.zeros(2, 8, 3, 5)}, r"v has shape \[2, 8, 3, 5\]"),
        ({"g": torch.zeros(2, 9, 3)}, r"g has shape \[2, 9, 3\]: give \[2, 9, 3, 6\]"),
        ({"g": torch.zeros(2, 9, 3, 6, dtype=torch.bfloat16)}, "g has dtype torch.bfloat16"),
        ({"u": torch.zeros(6)}, r"u has shape \[6\]: give \[3, 6\]"),
        ({"u": torch.zeros(3, 6, dtype=torch.int64)}, "u has dtype torch.int64"),
        ({"initial_state": torch.zeros(2, 3, 5, 6)}, r"initial_state has shape \[2, 3, 5, 6\]"),
        ({"scale": float("nan")}, "scale is nan: give a positive number, or None for 1$"),
        ({"implementation": "fla"}, "implementation is 'fla'"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip(["r", "k", "v", "g", "u"], inputs(9, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        rwkv6(**arguments)
