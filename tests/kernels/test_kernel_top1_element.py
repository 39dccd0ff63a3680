"""Top-1 Element, compared with loops written from its definition, and its gradients with the chain rule in numpy."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.top1_element import top1_element_attention


def brute_force_selection(q, k, offset=0):
    q, k = q.double().numpy(), k.double().numpy()
    batch, tq, hq, _ = q.shape
    group = hq // k.shape[2]
    best = np.zeros((batch, tq, hq), dtype=np.int64)
    for b, i, h in np.ndindex(batch, tq, hq):
        top = -np.inf
        for j in range(offset + i + 1):
            score = float(q[b, i, h] @ k[b, j, h // group])
            if score > top:  # strict, so that the first of equal scores wins
                top, best[b, i, h] = score, j
    return torch.from_numpy(best)


def take(v, best, hq):
    batch, tq, _ = best.shape
    out = torch.empty(batch, tq, hq, v.shape[3], dtype=v.dtype)
    for b, i, h in np.ndindex(batch, tq, hq):
        out[b, i, h] = v[b, best[b, i, h], h // (hq // v.shape[2])]
    return out


def brute_force_gradients(q, k, v, d_out, estimator, scale, offset=0):
    """Apply the chain rule explicitly, one query at a time."""
    best = brute_force_selection(q, k, offset).numpy()
    q, k, v, d_out = (x.double().numpy() for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen, kv, j_best = slice(0, offset + i + 1), h // group, best[b, i, h]
        s = scale * (k[b, seen, kv] @ q[b, i, h])
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        onehot = np.arange(len(s)) == j_best
        if estimator == "straight_through":
            d_p = v[b, seen, kv] @ d_out[b, i, h]  # a = onehot + p - stop(p): da/dp = 1
            d_s = p * (d_p - p @ d_p)
        else:
            d_s = (v[b, j_best, kv] @ d_out[b, i, h]) * (onehot - p)  # v_j* d(log p_j*)
        dv[b, seen, kv] += np.outer(onehot, d_out[b, i, h])  # a^T do, where a equals onehot in value
        dq[b, i, h] += scale * d_s @ k[b, seen, kv]
        dk[b, seen, kv] += scale * np.outer(d_s, q[b, i, h])
    return [torch.from_numpy(x) for x in (dq, dk, dv)]


def inputs(tq=37, tk=37, hq=4, hkv=2, d=5, dv=7, dtype=torch.float64, ties=False, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape, whole):
        if whole:
            return torch.randint(-1, 2, shape, generator=gen).to(dtype)
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    return draw(2, tq, hq, d, whole=ties), draw(2, tk, hkv, d, whole=ties), draw(2, tk, hkv, dv, whole=False)


@pytest.mark.parametrize("estimator", ["straight_through", "selected"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_output_is_exactly_the_best_value(estimator, dtype, ties, heads):
    q, k, v = inputs(hq=heads[0], hkv=heads[1], dtype=dtype, ties=ties)
    out, best = top1_element_attention(q, k, v, estimator=estimator, return_selection=True)
    expected = brute_force_selection(q, k)
    assert best.dtype == torch.int64
    assert torch.equal(best, expected)
    assert out.dtype == dtype
    assert torch.equal(out, take(v, expected, heads[0]))


def test_ties_go_to_the_lowest_index():
    q, k, v = torch.ones(1, 9, 1, 3), torch.ones(1, 9, 1, 3), torch.randn(1, 9, 1, 3)
    k[:, 4:] = 2.0
    _, best = top1_element_attention(q, k, v, return_selection=True)
    assert best.flatten().tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 4]


def test_a_scale_cannot_make_two_different_products_equal():
    # Adjacent fp32 values just below 2. Scaled to just above a power of two, half of the pairs round to the same value.
    k = torch.tensor([2.0 - 2.0**-22, 2.0 - 2.0**-23]).reshape(1, 2, 1, 1)
    scales = [1.0 + i / 100 for i in range(1, 50)]
    assert any(torch.equal(*(k * scale).flatten()) for scale in scales)
    for scale in scales:
        _, best = top1_element_attention(torch.ones_like(k), k, k, scale=scale, return_selection=True)
        assert best.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("estimator", ["straight_through", "selected"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("scale", [None, 1.3])
def test_gradient_matches_the_definition(estimator, ties, offset, scale):
    q, k, v = (x.requires_grad_() for x in inputs(tq=9, tk=13, ties=ties))
    out, _ = top1_element_attention(q, k, v, estimator=estimator, query_offset=offset, scale=scale)
    d_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), d_out)
    used = q.shape[3] ** -0.5 if scale is None else scale
    expected = brute_force_gradients(q.detach(), k.detach(), v.detach(), d_out, estimator, used, offset)
    for g, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_value_gradient_by_finite_differences():
    q, k, v = inputs(tq=5, tk=5)
    assert torch.autograd.gradcheck(lambda v: top1_element_attention(q, k, v)[0], (v.requires_grad_(),))


@pytest.mark.parametrize("estimator", ["straight_through", "selected"])
def test_low_precision_gradient_is_close(estimator):
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.bfloat16))
    out, selection = top1_element_attention(q, k, v, estimator=estimator)
    assert selection is None
    d_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), d_out)
    expected = brute_force_gradients(q.detach(), k.detach(), v.detach(), d_out, estimator, 5**-0.5)
    for g, e in zip(actual, expected, strict=True):
        assert g.dtype == torch.bfloat16
        torch.testing.assert_close(g.double(), e, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("ties", [False, True])
def test_query_offset(ties):
    q, k, v = inputs(ties=ties)
    whole, whole_best = top1_element_attention(q, k, v, return_selection=True)
    part, part_best = top1_element_attention(q[:, 11:25], k, v, query_offset=11, return_selection=True)
    assert torch.equal(part, whole[:, 11:25])
    assert torch.equal(part_best, whole_best[:, 11:25])


BOUNDS = [0, 1, 14, 14, 30, 37]


def rows_of_documents(x, bounds=BOUNDS):
    return [x[:1, start:end] for start, end in pairwise(bounds) if start < end]


@pytest.mark.parametrize("estimator", ["straight_through", "selected"])
@pytest.mark.parametrize("ties", [False, True])
def test_packed_documents_match_separate_documents(estimator, ties):
    q, k, v = (x[:1].clone().requires_grad_() for x in inputs(ties=ties))
    out, best = top1_element_attention(
        q, k, v, estimator=estimator, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32), return_selection=True
    )
    d_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), d_out)
    documents = [rows_of_documents(x.detach()) for x in (q, k, v, d_out)]
    for i, (q_i, k_i, v_i, d_out_i) in enumerate(zip(*documents, strict=True)):
        expected = brute_force_selection(q_i, k_i)
        assert torch.equal(rows_of_documents(best)[i], expected)  # relative to the document's start
        assert torch.equal(rows_of_documents(out)[i], take(v_i, expected, 4))
        alone, alone_best = top1_element_attention(q_i, k_i, v_i, estimator=estimator, return_selection=True)
        assert torch.equal(rows_of_documents(out)[i], alone)
        assert torch.equal(rows_of_documents(best)[i], alone_best)
        gradients = brute_force_gradients(q_i, k_i, v_i, d_out_i, estimator, q.shape[3] ** -0.5)
        for g, e in zip(actual, gradients, strict=True):
            torch.testing.assert_close(rows_of_documents(g)[i], e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("offset", [0, 5, 20, 32])
def test_a_part_of_the_queries_of_packed_documents(offset):
    q, k, v = (x[:1] for x in inputs())
    bounds = torch.tensor(BOUNDS)
    whole, whole_best = top1_element_attention(q, k, v, cu_seqlens=bounds, return_selection=True)
    end = min(offset + 12, 37)
    part, part_best = top1_element_attention(
        q[:, offset:end], k, v, cu_seqlens=bounds, query_offset=offset, return_selection=True
    )
    assert torch.equal(part, whole[:, offset:end])
    assert torch.equal(part_best, whole_best[:, offset:end])


def test_large_score_differences_give_finite_gradients():
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.float32))
    for estimator in ("straight_through", "selected"):
        out, _ = top1_element_attention(q * 1e4, k, v, estimator=estimator)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_invalid_arguments_raise():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="estimator is 'gumbel': use one of"):
        top1_element_attention(q, k, v, estimator="gumbel")
    with pytest.raises(ValueError, match="query_offset is 1"):
        top1_element_attention(q, k, v, query_offset=1)
    with pytest.raises(ValueError, match="implementation is 'sdpa'"):
        top1_element_attention(q, k, v, implementation="sdpa")
    for scale in (-1.0, 0.0, float("inf")):
        with pytest.raises(ValueError, match=rf"scale is {scale}: give a positive number, or None for 0.447214$"):
            top1_element_attention(q, k, v, scale=scale)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 36], "cu_seqlens runs from 0 to 36: begin at 0 and end at the 37 keys"),
        ([1, 37], "cu_seqlens runs from 1 to 37"),
        ([0, 20, 10, 37], r"cu_seqlens\[2\] is 10, below cu_seqlens\[1\] = 20"),
        ([0.0, 37.0], "cu_seqlens has shape .* and dtype torch.float32"),
        ([0], r"cu_seqlens has shape \[1\]"),
    ],
)
def test_invalid_bounds_raise(bounds, message):
    q, k, v = (x[:1] for x in inputs())
    with pytest.raises(ValueError, match=message):
        top1_element_attention(q, k, v, cu_seqlens=torch.tensor(bounds))


def test_packed_documents_need_one_row():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="cu_seqlens is given with a batch of 2"):
        top1_element_attention(q, k, v, cu_seqlens=torch.tensor([0, 37]))
