"""Gated delta rule, compared with a float64 loop in the paper's orientation and with finite differences."""

import numpy as np
import pytest
import torch
from stateful_cases import first_state
from torch.nn.functional import logsigmoid, normalize

from kernels.gated_delta_rule import gated_delta_rule

FORMS = ["recurrent", "chunked"]
LENGTHS = [1, 2, 63, 64, 65, 130]


def brute_force(q, k, v, g, beta, scale=None, state=None):
    """S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t (scale q_t); S is [dv, dk]."""
    q, k, v, g, beta = (x.double().numpy() for x in (q, k, v, g, beta))
    batch, length, heads, dk = q.shape
    scale = dk**-0.5 if scale is None else scale
    out = np.zeros(v.shape)
    last = np.zeros((batch, heads, dk, v.shape[3]))
    for b, h in np.ndindex(batch, heads):
        s = np.zeros((v.shape[3], dk)) if state is None else state[b, h].double().numpy().T
        for t in range(length):
            key, strength = k[b, t, h], beta[b, t, h]
            forget = np.eye(dk) - strength * np.outer(key, key)
            s = np.exp(g[b, t, h]) * s @ forget + strength * np.outer(v[b, t, h], key)
            out[b, t, h] = s @ (scale * q[b, t, h])
        last[b, h] = s.T
    return torch.from_numpy(out), torch.from_numpy(last)


def inputs(length, heads=3, dk=6, dv=5, dtype=torch.float64, forget=1.0, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(2, length, heads, *shape, generator=gen, dtype=torch.float64)

    q, k, v = draw(dk), normalize(draw(dk), dim=-1), draw(dv)
    g, beta = forget * logsigmoid(draw()), draw().sigmoid()
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    return q.to(dtype), k.to(dtype), v.to(dtype), g.to(gate), beta.to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_matches_the_papers_recurrence(form, length, with_state, scale):
    arguments = inputs(length)
    state = first_state() if with_state else None
    out, last = gated_delta_rule(
        *arguments, scale=scale, initial_state=state, output_final_state=True, implementation=form
    )
    expected, expected_last = brute_force(*arguments, scale=scale, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forget", [0.0, 0.01, 1.0, 50.0])
def test_low_precision_is_close_and_keeps_its_dtype(form, dtype, forget):
    arguments = inputs(130, dtype=dtype, forget=forget)
    out, last = gated_delta_rule(*arguments, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments)
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    # The state stays in fp32, whatever the dtype of the inputs.
    torch.testing.assert_close(last.double(), expected_last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 50, 64, 129])
def test_state_carries_over_between_two_parts(form, cut):
    arguments = inputs(130)
    whole, last = gated_delta_rule(*arguments, output_final_state=True, implementation=form)
    left, state = gated_delta_rule(*(x[:, :cut] for x in arguments), output_final_state=True, implementation=form)
    right, right_last = gated_delta_rule(
        *(x[:, cut:] for x in arguments), initial_state=state, output_final_state=True, implementation=form
    )
    torch.testing.assert_close(torch.cat([left, right], dim=1), whole, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(right_last, last, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 5])
def test_gradient_by_finite_differences(form, length):
    arguments = [x.requires_grad_() for x in inputs(length, heads=2, dk=3, dv=2)]
    state = first_state(2, 3, 2).requires_grad_()

    def op(q, k, v, g, beta, state):
        return gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, implementation=form)

    assert torch.autograd.gradcheck(op, (*arguments, state))


def test_gradient_of_chunked_across_chunks_by_finite_differences():
    arguments = [x.requires_grad_() for x in inputs(67, heads=1, dk=2, dv=2)]
    direction = [torch.randn_like(x) for x in arguments]
    weight = torch.randn(2, 67, 1, 2, dtype=torch.float64)

    def loss(*x):
        return (gated_delta_rule(*x, implementation="chunked")[0] * weight).sum()

    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(*arguments), arguments), direction, strict=True))
    with torch.no_grad():
        ahead, behind = (loss(*(x + e * d for x, d in zip(arguments, direction, strict=True))) for e in (1e-6, -1e-6))
    torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("forget", [0.0, 1.0, 1000.0])
def test_implementations_have_equal_finite_gradients_in_fp32(forget):
    gradients = []
    for form in FORMS:
        arguments = [x.requires_grad_() for x in inputs(130, dtype=torch.float32, forget=forget)]
        out, _ = gated_delta_rule(*arguments, implementation=form)
        gradients.append(torch.autograd.grad(out.square().sum(), arguments))
    for a, b in zip(*gradients, strict=True):
        assert a.isfinite().all()
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


def test_auto_under_autocast():
    arguments = inputs(65, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = gated_delta_rule(*arguments)
    assert state is None
    torch.testing.assert_close(out.double(), brute_force(*arguments)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 9)}, r"q has shape \[2, 9\]"),
        ({"k": torch.zeros(2, 9, 3, 4)}, "k has shape"),
        ({"v": torch.zeros(2, 8, 3, 5)}, "v has shape"),
        ({"g": torch.zeros(2, 9)}, r"g has shape \[2, 9\]: give \[2, 9, 3\]"),
        ({"g": torch.zeros(2, 9, 3, dtype=torch.bfloat16)}, "g has dtype torch.bfloat16"),
        ({"beta": torch.zeros(2, 9, 3, dtype=torch.int64)}, "beta has dtype torch.int64"),
        ({"initial_state": torch.zeros(2, 3, 5, 6)}, "initial_state has shape"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"implementation": "fla"}, "implementation is 'fla'"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip(["q", "k", "v", "g", "beta"], inputs(9, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**arguments)
