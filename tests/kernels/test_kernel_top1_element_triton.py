"""Top-1 Element's Triton kernels, compared with its reference in float64: on a GPU, or in Triton's interpreter.

Queries and keys lie on a coarse grid, so that products are exact in fp32 in any order of summation. Choices, ties
included, must then be identical.
"""

import itertools
import logging
import math

import pytest
import torch
from covering import cases, kernel_cases
from triton_cases import BF16, DEVICE, FP16, FP32, ON_GPU, TOLERANCE, draw, needs_gpu, poison, relative_rms

pytest.importorskip("triton")

from kernels.top1_element import top1_element_attention
from kernels.top1_element.op import top1_element, top1_element_backward
from kernels.top1_element.ranges import Shape, visible_ranges

# In the interpreter, masked lanes compute infinities and NaN with numpy, which warns about them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

__all__ = ["poison"]  # imported as a fixture

ESTIMATORS = ["straight_through", "selected"]

if ON_GPU:
    CASES = [(t, 64, dtype) for t in (1, 63, 128, 129, 1000, 4096, 5001) for dtype in (BF16, FP32)]
    CASES += [(1000, d, dtype) for d in (32, 80, 96, 128, 192, 256) for dtype in (BF16, FP32)]
    CASES += [(1000, d, FP16) for d in (64, 80, 256)]
    CASES = [(*case, estimator) for case in CASES for estimator in ESTIMATORS]
else:
    CASES = [(1, 16, FP32), (33, 64, FP32), (70, 20, FP32), (129, 80, BF16), (150, 64, FP16), (65, 130, BF16)]
    CASES = cases(
        every=[(*case, estimator) for case in CASES for estimator in ESTIMATORS],
        default=[(*case, estimator) for case, estimator in zip(CASES, ESTIMATORS * 3, strict=True)],
    )


def run(tensors, implementation, **options):
    """Return the output, the choice and the gradients of q, k and v."""
    *inputs, grad = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, best = top1_element_attention(*inputs, return_selection=True, implementation=implementation, **options)
    return out, best, torch.autograd.grad(out, inputs, grad)


def check(tensors, **options):
    out, best, gradients = run(tensors, "triton", **options)
    expected_out, expected_best, expected_gradients = run([x.double() for x in tensors], "reference", **options)
    assert best.dtype == torch.int64
    assert torch.equal(best, expected_best)
    assert out.dtype == tensors[0].dtype
    assert torch.equal(out.double(), expected_out)
    for name, x, actual, expected in zip("qkv", tensors, gradients, expected_gradients, strict=False):
        assert actual.dtype == x.dtype
        assert actual.shape == x.shape
        assert relative_rms(actual, expected) < TOLERANCE[x.dtype], f"gradient of {name}"


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("length", "d", "dtype", "estimator"), CASES)
def test_matches_the_reference(length, d, dtype, estimator):
    check(draw(length, d=d, dtype=dtype), estimator=estimator)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("heads", "estimator"),
    kernel_cases(
        every=itertools.product([(4, 2), (3, 3)], ESTIMATORS),
        default=[((4, 2), "straight_through"), ((4, 2), "selected"), ((3, 3), "selected")],
    ),
)
def test_batches_and_groups_of_heads(heads, estimator):
    check(draw(45, heads=heads, batch=2), estimator=estimator)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("tq", "tk", "offset"),
    kernel_cases(every=[(40, 100, 0), (40, 100, 33), (1, 70, 69)], default=[(40, 100, 33), (1, 70, 69)]),
)
def test_a_part_of_the_queries(tq, tk, offset, estimator):
    check(draw(tq, tk, batch=2), estimator=estimator, query_offset=offset)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("bounds", "tq", "offset"),
    kernel_cases(
        every=[([0, 1, 40, 40, 41, 100], 100, 0), ([0, 1, 40, 40, 41, 100], 50, 30), ([0, 32, 64, 100], 50, 30)],
        default=[([0, 1, 40, 40, 41, 100], 50, 30), ([0, 32, 64, 100], 50, 30)],
    ),
)
def test_packed_documents(bounds, tq, offset, estimator):
    bounds = torch.tensor(bounds, dtype=torch.int32)
    check(draw(tq, 100), estimator=estimator, query_offset=offset, cu_seqlens=bounds)


@needs_gpu
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_packed_documents_with_wide_tiles_and_bounds_on_the_gpu(estimator):
    bounds = torch.tensor([0, 1, 300, 300, 1000, 1128, 3001], device=DEVICE)
    check(draw(3001, d=128, dtype=BF16), estimator=estimator, cu_seqlens=bounds)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_many_ties(dtype, estimator):
    tensors = draw(140 if ON_GPU or dtype == BF16 else 80, d=16, dtype=dtype, step=1.0)  # several tiles of keys
    tensors[:2] = [x.clamp(-1, 1) for x in tensors[:2]]
    check(tensors, estimator=estimator)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_first_of_equal_keys_in_several_tiles_wins(dtype):
    _, _, v, grad = draw(140, heads=(1, 1), dtype=dtype)
    q, k = torch.ones_like(v), torch.ones_like(v)
    k[:, 50:] = 2.0
    _, best, _ = run([q, k, v, grad], "triton")
    assert best.flatten().tolist() == [0] * 50 + [50] * 90


def test_a_scale_cannot_make_two_different_products_equal():
    # Adjacent fp32 values just below 2. Scaled to just above a power of two, half of the pairs round to the same value.
    k = torch.zeros(1, 2, 1, 16, device=DEVICE)
    k[..., 0] = torch.tensor([[2.0 - 2.0**-22, 2.0 - 2.0**-23]]).T
    scales = [1.0 + i / 100 for i in range(1, 50, 7)]
    assert any(torch.equal(*(k * scale)[0, :, 0, 0]) for scale in scales)
    for scale in scales:
        _, best, _ = run([torch.ones_like(k), k, k, k], "triton", scale=scale)
        assert best.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_uniform_softmax_covers_the_document(estimator):
    # The operator's scale 0, which the interface refuses, makes the softmax uniform. A document begins in a later tile.
    q, k, v, _ = draw(70)
    bounds = torch.tensor([0, 40, 70])
    _, soft, lse, _ = top1_element(q, k, v, bounds, estimator, True, 0.0, 0)
    seen = torch.cat([torch.arange(1, 41), torch.arange(1, 31)]).to(DEVICE)
    torch.testing.assert_close(lse, seen.log2().expand_as(lse), rtol=1e-6, atol=1e-6)
    if estimator == "straight_through":
        mean_of_last = v[:, 40:].mean(1).expand(1, 2, 16)
        torch.testing.assert_close(soft[:, -1], mean_of_last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_large_score_differences(estimator):
    q, k, v, grad = draw(70)
    check([q * 8, k, v, grad], estimator=estimator)
    assert all(x.isfinite().all() for x in run([q * 2.0**14, k, v, grad], "triton", estimator=estimator)[2])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_chosen_key_of_arbitrary_inputs_scores_best(dtype):
    length = 2000 if ON_GPU else 140
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, length, 2, 64, generator=gen).to(DEVICE, dtype) for _ in range(3))
    out, best = top1_element_attention(q, k, v, return_selection=True, implementation="triton")
    products = torch.einsum("bthd,bshd->bths", q.double(), k.double())
    products.masked_fill_(torch.ones(length, length, device=DEVICE).triu(1).bool()[:, None], -math.inf)
    actual = products.gather(-1, best[..., None])[..., 0]
    torch.testing.assert_close(actual, products.amax(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(out, v.gather(1, best[..., None].expand_as(v)))


def test_nan_query_does_not_affect_others():
    q, k, v, grad = draw(40)
    _, best, gradients = run([q, k, v, grad], "triton")
    q[:, 20, 0] = math.nan
    _, spoilt_best, spoilt = run([q, k, v, grad], "triton")
    assert spoilt_best[0, 20, 0] == 0
    best[:, 20, 0] = 0
    assert torch.equal(spoilt_best, best)
    assert spoilt[0][:, 20, 0].isnan().all()
    gradients[0][:, 20, 0] = spoilt[0][:, 20, 0] = 0
    assert torch.equal(spoilt[0], gradients[0])


def test_inputs_need_not_be_contiguous():
    tensors = draw(40)
    expected = run(tensors, "triton")
    actual = run([x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors], "triton")
    for a, b in zip((*actual[:2], *actual[2]), (*expected[:2], *expected[2]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_are_deterministic(estimator):
    tensors = draw(1000 if ON_GPU else 40, dtype=BF16)
    first, second = (run(tensors, "triton", estimator=estimator)[2] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_saved_without_gradients():
    q, k, v, grad = draw(40)
    out, soft, lse, chosen = top1_element(q, k, v, None, "straight_through", False, 0.25, 0)
    assert soft.numel() == lse.numel() == 0
    assert torch.equal(out, run([q, k, v, grad], "triton")[0])
    assert chosen.dtype == torch.int32
    with torch.no_grad():
        assert not top1_element_attention(q.requires_grad_(), k, v, implementation="triton")[0].requires_grad
    forgot = top1_element(q, k, v, None, "straight_through", False, 0.25, 0)[0]
    with pytest.raises(RuntimeError, match="training is False"):
        forgot.sum().backward()


@pytest.mark.parametrize(("estimator", "bounds"), [("straight_through", None), ("selected", [0, 7, 24])])
def test_operators_pass_opcheck(estimator, bounds):
    q, k, v, grad = draw(24)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    others = (cu_seqlens, estimator, True, 0.25, 0)
    out, soft, lse, chosen = top1_element(q, k, v, *others)
    mixed = soft if estimator == "straight_through" else out
    torch.library.opcheck(top1_element_backward, (grad, q, k, v, mixed, lse, chosen, cu_seqlens, estimator, 0.25, 0))
    torch.library.opcheck(top1_element, (*(x.requires_grad_() for x in (q, k, v)), *others))


@needs_gpu
@pytest.mark.parametrize("bounds", [None, [0, 100, 300]])
def test_compiles_without_a_graph_break(bounds):
    tensors = draw(300, d=64, dtype=BF16)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    compiled = torch.compile(top1_element_attention, fullgraph=True)
    inputs = [x.detach().requires_grad_() for x in tensors[:3]]
    out, best = compiled(*inputs, cu_seqlens=cu_seqlens, return_selection=True, implementation="triton")
    gradients = torch.autograd.grad(out, inputs, tensors[3])
    expected = run(tensors, "triton", cu_seqlens=cu_seqlens)
    for a, b in zip((out, best, *gradients), (*expected[:2], *expected[2]), strict=True):
        assert torch.equal(a, b)


@needs_gpu
def test_more_elements_than_int32_holds():
    # Packed, so that the reference can compute the last document alone.
    length, size = 2**19 + 100, 300
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    gen = torch.Generator(DEVICE).manual_seed(0)
    tensors = [torch.randn(1, length, 32, 128, generator=gen, device=DEVICE, dtype=BF16) for _ in range(4)]
    for x in tensors[:2]:
        x.round_()
    bounds = torch.tensor([*range(0, length - size, 4096), length - size, length])
    out, best, gradients = run(tensors, "triton", cu_seqlens=bounds)
    expected = run([x[:, -size:].double() for x in tensors], "reference")
    assert torch.equal(best[:, -size:], expected[1])
    assert torch.equal(out[:, -size:].double(), expected[0])
    for actual, target in zip(gradients, expected[2], strict=True):
        assert relative_rms(actual[:, -size:], target) < TOLERANCE[BF16]


@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 9, 20], [0, 1, 2, 20]])
@pytest.mark.parametrize(("num_queries", "offset"), [(20, 0), (7, 0), (7, 6), (3, 17)])
def test_visible_ranges(num_queries, offset, bounds):
    batch, num_keys = (2, 20) if bounds is None else (1, 20)
    shape = Shape(batch, num_queries, num_keys, offset)
    ranges = visible_ranges(shape, None if bounds is None else tuple(bounds), torch.device("cpu"))
    document = [sum(s >= bound for bound in (bounds or [0])) for s in range(num_keys)]
    expected = torch.zeros(batch * num_queries, batch * num_keys, dtype=torch.bool)
    for b in range(batch):
        for t in range(num_queries):
            for s in range(offset + t + 1):
                if document[s] == document[offset + t]:
                    expected[b * num_queries + t, b * num_keys + s] = True
    t, s = torch.arange(len(expected))[:, None], torch.arange(expected.shape[1])
    assert torch.equal((s >= ranges.first_key[:, None]) & (s <= ranges.own_key[:, None]), expected)
    assert torch.equal((t >= ranges.first_query) & (t < ranges.end_query), expected)
    for x in ranges:
        assert x.dtype == torch.int32
        assert (x.diff() >= 0).all()


def test_auto_chooses_triton_only_on_a_gpu(caplog):
    caplog.set_level(logging.DEBUG, logger="kernels.common.dispatch")
    q, k, v, _ = draw(5)
    top1_element_attention(q, k, v)
    assert f"top1_element_attention: {'triton' if ON_GPU else 'reference'}" in caplog.text
    caplog.clear()
    top1_element_attention(q, k, v[..., :3])
    assert "top1_element_attention: reference" in caplog.text
    assert ("v has head_dim 3" in caplog.text) == ON_GPU


def test_unsupported_triton_inputs_raise(monkeypatch):
    def refuse(message, q, k, v):
        with pytest.raises(ValueError, match=f"implementation is 'triton', but {message}"):
            top1_element_attention(q, k, v, implementation="triton")

    q, k, v, _ = draw(5)
    refuse("q has dtype torch.float64", q.double(), k.double(), v.double())
    refuse("v has head_dim 8: give that of q, 16", q, k, v[..., :8])
    refuse("q has head_dim 272: give at most 256", *(x.repeat(1, 1, 1, 17) for x in (q, k, v)))
    many = v[:, :1].expand(1, 2**31, 2, 16)
    refuse("k has 1 rows of 2147483648 keys: give at most", q, many, many)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refuse("q is on cpu: move it to a GPU", *(x.cpu() for x in (q, k, v)))
