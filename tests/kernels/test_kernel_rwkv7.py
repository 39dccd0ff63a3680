"""RWKV-7's state update, compared with a float64 loop in the paper's orientation and finite differences."""

import itertools

import numpy as np
import pytest
import torch
from covering import cases
from stateful_cases import first_state
from torch.nn.functional import logsigmoid, normalize

from kernels.gated_delta_rule import gated_delta_rule
from kernels.rwkv7 import interface, rwkv7

FORMS = ["recurrent", "chunked"]
LENGTHS = [1, 2, 15, 16, 17, 50]


def brute_force(r, k, v, g, a, b, scale=1.0, state=None):
    """S_t = S_{t-1} (diag(exp(g_t)) + a_t b_t^T) + v_t k_t^T, o_t = S_t (scale r_t); S is [dv, dk]."""
    r, k, v, g, a, b = (x.double().numpy() for x in (r, k, v, g, a, b))
    batch, length, heads, dk = r.shape
    out, last = np.zeros(v.shape), np.zeros((batch, heads, dk, v.shape[3]))
    for i, h in np.ndindex(batch, heads):
        s = np.zeros((v.shape[3], dk)) if state is None else state[i, h].double().numpy().T
        for t in range(length):
            transition = np.diag(np.exp(g[i, t, h])) + np.outer(a[i, t, h], b[i, t, h])
            s = s @ transition + np.outer(v[i, t, h], k[i, t, h])
            out[i, t, h] = s @ (scale * r[i, t, h])
        last[i, h] = s.T
    return torch.from_numpy(out), torch.from_numpy(last)


def inputs(length, heads=3, dk=6, dv=5, dtype=torch.float64, forget=1.0, seed=0):
    """Draw inputs like the model's: a = -kappa_hat of length 1, b = kappa_hat * rate."""
    gen = torch.Generator().manual_seed(seed)

    def draw(size):
        return torch.randn(2, length, heads, size, generator=gen, dtype=torch.float64)

    r, k, v, kappa = draw(dk), draw(dk), draw(dv), normalize(draw(dk), dim=-1)
    g = (forget * logsigmoid(draw(dk))).to(torch.float64 if dtype == torch.float64 else torch.float32)
    r, k, v, a, b = (x.to(dtype) for x in (r, k, v, -kappa, kappa * draw(dk).sigmoid()))
    return r, k, v, g, a, b


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("with_state", [False, True])
def test_matches_the_papers_recurrence_without_a_scale(form, length, with_state):
    arguments = inputs(length)
    state = first_state() if with_state else None
    out, last = rwkv7(*arguments, initial_state=state, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_a_not_parallel_to_b_and_scale(form):
    r, k, v, g, _, _ = inputs(50)
    gen = torch.Generator().manual_seed(3)
    a, b = (0.3 * torch.randn(r.shape, generator=gen, dtype=torch.float64) for _ in range(2))
    arguments, state = (r, k, v, g, a, b), first_state()
    out, last = rwkv7(*arguments, scale=0.3, initial_state=state, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments, scale=0.3, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_read_precedes_the_decay(form):
    # Hand count with one feature: S = e^g S_0 + b (a S_0) + k v and o = r S.
    r, k, v, a, b, state = (torch.full((1, 1, 1, 1), x) for x in (2.0, 3.0, 5.0, -1.0, 0.25, 16.0))
    g = torch.full((1, 1, 1, 1), 0.5).log()
    out, last = rwkv7(r, k, v, g, a, b, initial_state=state, output_final_state=True, implementation=form)
    assert (out.item(), last.item()) == (2.0 * 19.0, 0.5 * 16.0 - 0.25 * 16.0 + 15.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forget", [0.01, 1.0])
def test_low_precision_is_close_and_keeps_its_dtype(form, dtype, forget):
    arguments = inputs(50, dtype=dtype, forget=forget)
    out, last = rwkv7(*arguments, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments)
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    tolerance = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    # The state stays in fp32, whatever the dtype of the inputs.
    torch.testing.assert_close(last.double(), expected_last, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 16, 33, 49])
def test_state_carries_over_between_two_parts(form, cut):
    arguments = inputs(50)
    options = {"output_final_state": True, "implementation": form}
    whole, last = rwkv7(*arguments, **options)
    left, state = rwkv7(*(x[:, :cut] for x in arguments), **options)
    right, right_last = rwkv7(*(x[:, cut:] for x in arguments), initial_state=state, **options)
    torch.testing.assert_close(torch.cat([left, right], dim=1), whole, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(right_last, last, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_final_state_is_affine_in_the_initial_state(form):
    r, k, v, g, a, b = inputs(50, forget=0.1)
    state, identity = first_state(), torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6)
    options = {"output_final_state": True, "implementation": form}
    wide_v, wide_state = torch.cat([v, torch.zeros_like(k)], -1), torch.cat([torch.zeros_like(state), identity], -1)
    _, wide = rwkv7(r, k, wide_v, g, a, b, initial_state=wide_state, **options)
    own, transition = wide.split([5, 6], dim=-1)
    _, last = rwkv7(r, k, v, g, a, b, initial_state=state, **options)
    torch.testing.assert_close(last, transition @ state + own, rtol=1e-9, atol=1e-11)
    expected = identity
    for t in range(50):
        expected = (g[:, t].exp().diag_embed() + torch.einsum("bhi,bhj->bhij", b[:, t], a[:, t])) @ expected
    torch.testing.assert_close(transition, expected, rtol=1e-9, atol=1e-11)


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

    def op(r, k, v, g, a, b, state):
        return rwkv7(r, k, v, g, a, b, initial_state=state, output_final_state=True, implementation=form)

    assert torch.autograd.gradcheck(op, (*arguments, state))


@pytest.mark.parametrize("forget", [0.0, 1.0, 1000.0])
def test_implementations_have_equal_finite_gradients_in_fp32(forget):
    gradients = []
    for form in FORMS:
        arguments = [x.requires_grad_() for x in inputs(50, dtype=torch.float32, forget=forget)]
        state = first_state().requires_grad_()
        out, last = rwkv7(*arguments, initial_state=state, output_final_state=True, implementation=form)
        gradients.append(torch.autograd.grad(out.sin().sum() + last.sin().sum(), (*arguments, state)))
    for one, other in zip(*gradients, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_very_strong_decay_stays_finite(form):
    r, k, v, g, a, b = inputs(50, dtype=torch.float32)
    g[..., ::2] = -60
    arguments = [x.requires_grad_() for x in (r, k, v, g, a, b)]
    out, last = rwkv7(*arguments, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*(x.detach() for x in arguments))
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(last.double(), expected_last, rtol=2e-5, atol=2e-5)
    for gradient in torch.autograd.grad(out.sin().sum() + last.sin().sum(), arguments):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_gated_delta_rule_as_special_case(form):
    r, _, v, _, a, _ = inputs(50)
    gen = torch.Generator().manual_seed(5)
    logits, strength = (torch.randn(2, 50, 3, generator=gen, dtype=torch.float64) for _ in range(2))
    g, beta, key = logsigmoid(logits), strength.sigmoid(), -a
    options = {"scale": 0.3, "initial_state": first_state(), "output_final_state": True}
    # exp(g) S - beta exp(g) k (k^T S) + beta k v^T
    written = beta[..., None] * key
    of_features, b = g[..., None].expand(r.shape), g.exp()[..., None] * written
    out, last = rwkv7(r, written, v, of_features, -key, b, **options, implementation=form)
    expected, expected_last = gated_delta_rule(r, key, v, g, beta, **options, implementation="recurrent")
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-11)


def test_auto_under_autocast():
    arguments = inputs(50, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = rwkv7(*arguments)
    assert state is None
    torch.testing.assert_close(out.double(), brute_force(*arguments)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bound", [None, -0.61])
def test_decay_bound_is_passed_to_fla(monkeypatch, bound):
    importable = pytest.importorskip("fla.ops.rwkv7", reason="flash-linear-attention is not installed")
    monkeypatch.setattr(interface, "choose_fla_or_plain", lambda *_: "fla")
    bounds = []

    def chunk_rwkv7(*, lower_bound, initial_state, output_final_state, w, **arguments):
        bounds.append(lower_bound)
        return brute_force(g=w, **arguments, state=initial_state)

    monkeypatch.setattr(importable, "chunk_rwkv7", chunk_rwkv7)
    arguments = inputs(9)
    out, _ = rwkv7(*arguments, log_decay_bound=bound)
    assert bounds == [bound]
    torch.testing.assert_close(out, brute_force(*arguments)[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay_bound": 0.0}, "log_decay_bound is 0.0: give a negative number, or None"),
        ({"log_decay_bound": float("nan")}, "log_decay_bound is nan"),
        ({"r": torch.zeros(2, 9)}, r"r has shape \[2, 9\]"),
        ({"r": torch.zeros(2, 0, 3, 6)}, r"r has shape \[2, 0, 3, 6\]"),
        ({"r": torch.zeros(2, 9, 3, 6, dtype=torch.int64)}, "r has dtype torch.int64"),
        ({"g": torch.zeros(2, 9, 3)}, r"g has shape \[2, 9, 3\]: give \[2, 9, 3, 6\]"),
        ({"g": torch.zeros(2, 9, 3, 6, dtype=torch.bfloat16)}, "g has dtype torch.bfloat16"),
        ({"k": torch.zeros(2, 9, 3, 6, dtype=torch.bfloat16)}, "k has dtype torch.bfloat16 but r has torch.float32"),
        ({"k": torch.zeros(2, 9, 3, 4)}, r"k has shape \[2, 9, 3, 4\]"),
        ({"v": torch.zeros(2, 9, 15)}, r"v has shape \[2, 9, 15\]"),
        ({"v": torch.zeros(2, 8, 3, 5)}, r"v has shape \[2, 8, 3, 5\]"),
        ({"a": torch.zeros(2, 9, 3)}, r"a has shape \[2, 9, 3\]: give \[2, 9, 3, 6\]"),
        ({"a": torch.zeros(2, 9, 3, 6, dtype=torch.int64)}, "a has dtype torch.int64"),
        ({"b": torch.zeros(2, 9, 3, 5)}, r"b has shape \[2, 9, 3, 5\]: give \[2, 9, 3, 6\]"),
        ({"b": torch.zeros(2, 9, 3, 6, dtype=torch.bool)}, "b has dtype torch.bool"),
        ({"initial_state": torch.zeros(2, 3, 5, 6)}, r"initial_state has shape \[2, 3, 5, 6\]"),
        ({"scale": float("nan")}, "scale is nan: give a positive number, or None for 1$"),
        ({"implementation": "fla"}, "implementation is 'fla'"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip(["r", "k", "v", "g", "a", "b"], inputs(9, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        rwkv7(**arguments)
