"""Gated linear attention, compared with a float64 sum over all pairs and with finite differences."""

import itertools

import numpy as np
import pytest
import torch
from covering import cases
from stateful_cases import first_state
from torch.nn.functional import logsigmoid

from kernels.gated_linear_attention import gated_linear_attention

FORMS = ["recurrent", "chunked"]
DECAYS = [None, "constant", "head", "feature"]


def brute_force(q, k, v, g, scale=None, state=None):
    """Compute o_t without a state.

    The output is the sum over s <= t of v_s times q_t . k_s, with each feature decayed from s to t.
    """
    batch, length, heads, dk = q.shape
    scale = dk**-0.5 if scale is None else scale
    g = torch.zeros(1) if g is None else g
    g = g if g.dim() == 4 else g.expand(q.shape[:3])[..., None].expand(q.shape)
    q, k, v, g = (x.double().numpy() for x in (q, k, v, g))
    out, last = np.zeros(v.shape), np.zeros((batch, heads, dk, v.shape[3]))
    for b, h in np.ndindex(batch, heads):
        first = np.zeros((dk, v.shape[3])) if state is None else state[b, h].double().numpy()
        total = g[b, :, h].cumsum(0)
        for t in range(length):
            faded = k[b, : t + 1, h] * np.exp(total[t] - total[: t + 1])
            old = np.exp(total[t])[:, None] * first
            out[b, t, h] = scale * ((faded @ q[b, t, h]) @ v[b, : t + 1, h] + q[b, t, h] @ old)
        last[b, h] = faded.T @ v[b, :, h] + old
    return torch.from_numpy(out), torch.from_numpy(last)


def inputs(length, decay, heads=3, dk=6, dv=5, dtype=torch.float64, forget=1.0, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(2, length, heads, *shape, generator=gen, dtype=torch.float64)

    gate = torch.float64 if dtype == torch.float64 else torch.float32
    g = None if decay is None else (forget * logsigmoid(draw(*([dk] if decay == "feature" else [])))).to(gate)
    g = g[0, 0] if decay == "constant" else g
    return draw(dk).to(dtype), draw(dk).to(dtype), draw(dv).to(dtype), g


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 65, 130])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("with_state", "scale"), [(False, None), (True, 0.3)])
def test_matches_the_sum_over_pairs(form, length, decay, with_state, scale):
    arguments = inputs(length, decay)
    state = first_state() if with_state else None
    options = {"scale": scale, "initial_state": state, "output_final_state": True, "implementation": form}
    out, last = gated_linear_attention(*arguments, **options)
    expected, expected_last = brute_force(*arguments, scale=scale, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(last, expected_last, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", DECAYS)
def test_low_precision_is_close_and_keeps_its_dtype(form, dtype, decay):
    arguments = inputs(130, decay, dtype=dtype)
    out, last = gated_linear_attention(*arguments, output_final_state=True, implementation=form)
    expected, expected_last = brute_force(*arguments)
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    tolerance = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    # The state stays in fp32, whatever the dtype of the inputs.
    torch.testing.assert_close(last.double(), expected_last, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cut", [1, 64, 129])
def test_state_carries_over_between_two_parts(form, decay, cut):
    arguments = inputs(130, decay)
    options = {"output_final_state": True, "implementation": form}
    whole, last = gated_linear_attention(*arguments, **options)
    *qkv, g = arguments
    by_token = g is not None and g.dim() > 1
    left, right = (
        [*(x[:, part] for x in qkv), g[:, part] if by_token else g] for part in (slice(cut), slice(cut, None))
    )
    left_out, state = gated_linear_attention(*left, **options)
    right_out, right_last = gated_linear_attention(*right, initial_state=state, **options)
    torch.testing.assert_close(torch.cat([left_out, right_out], dim=1), whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(right_last, last, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("decay", DECAYS[1:])
@pytest.mark.parametrize(
    ("form", "length"),
    cases(
        every=itertools.product(FORMS, [1, 5, 18]),  # 18: two chunks of decays by feature
        default=[("recurrent", 5), ("chunked", 1), ("chunked", 18)],
    ),
)
def test_gradient_by_finite_differences(form, decay, length):
    arguments = [x.requires_grad_() for x in inputs(length, decay, heads=1, dk=2, dv=2)]
    state = first_state(1, 2, 2).requires_grad_()

    def op(q, k, v, g, state):
        return gated_linear_attention(q, k, v, g, initial_state=state, output_final_state=True, implementation=form)

    assert torch.autograd.gradcheck(op, (*arguments, state))


@pytest.mark.parametrize("decay", DECAYS[1:])
@pytest.mark.parametrize("forget", [0.0, 1.0, 1000.0])
def test_implementations_have_equal_finite_gradients_in_fp32(decay, forget):
    gradients = []
    for form in FORMS:
        arguments = [x.requires_grad_() for x in inputs(130, decay, dtype=torch.float32, forget=forget)]
        out, _ = gated_linear_attention(*arguments, implementation=form)
        gradients.append(torch.autograd.grad(out.sin().sum(), arguments))
    for a, b in zip(*gradients, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_auto_under_autocast():
    arguments = inputs(65, "head", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = gated_linear_attention(*arguments)
    assert state is None
    torch.testing.assert_close(out.double(), brute_force(*arguments)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 9)}, r"q has shape \[2, 9\]"),
        ({"k": torch.zeros(2, 9, 3, 4)}, "k has shape"),
        ({"v": torch.zeros(2, 8, 3, 5)}, "v has shape"),
        ({"g": torch.zeros(2, 9)}, r"g has shape \[2, 9\]: give \[2, 9, 3\]"),
        ({"g": torch.zeros(2)}, r"g has shape \[2\]: give \[3\]"),
        ({"g": torch.zeros(2, 9, 3, 5)}, r"g has shape \[2, 9, 3, 5\]: give \[2, 9, 3, 6\]"),
        ({"g": torch.zeros(2, 9, 3, dtype=torch.bfloat16)}, "g has dtype torch.bfloat16"),
        ({"initial_state": torch.zeros(2, 3, 5, 6)}, "initial_state has shape"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"implementation": "fla"}, "implementation is 'fla'"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip(["q", "k", "v", "g"], inputs(9, "head", dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**arguments)
