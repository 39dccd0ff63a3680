"""`softmax_attention`, compared with loops written from its definition, and its gradient with finite differences."""

import math

import numpy as np
import pytest
import torch

from kernels.softmax_attention import alibi_slopes, softmax_attention

IMPLEMENTATIONS = ["reference", "sdpa"]


def brute_force(q, k, v, scale=None, window=None, slopes=None, offset=0):
    q, k, v = (x.double().numpy() for x in (q, k, v))
    batch, tq, hq, d = q.shape
    group = hq // k.shape[2]
    scale = d**-0.5 if scale is None else scale
    out = np.zeros((batch, tq, hq, v.shape[3]))
    for b in range(batch):
        for i in range(tq):
            t = offset + i
            first = 0 if window is None else max(0, t - window + 1)
            for h in range(hq):
                scores = []
                for j in range(first, t + 1):
                    bias = 0.0 if slopes is None else float(slopes[h]) * (t - j)
                    scores.append(scale * sum(q[b, i, h, c] * k[b, j, h // group, c] for c in range(d)) - bias)
                weights = [math.exp(s - max(scores)) for s in scores]
                for j, w in zip(range(first, t + 1), weights, strict=True):
                    out[b, i, h] += w / sum(weights) * v[b, j, h // group]
    return torch.from_numpy(out)


def inputs(tq=13, tk=13, hq=4, hkv=2, d=6, dv=6, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = [(2, tq, hq, d), (2, tk, hkv, d), (2, tk, hkv, dv)]
    return [torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


CASES = {
    "plain": {},
    "scale": {"scale": 0.7},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "window longer than the text": {"window": 50},
    "alibi": {"alibi": True},
    "alibi and window": {"alibi": True, "window": 5},
}


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "auto"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("offset", [0, 3])
def test_matches_the_definition(implementation, case, heads, offset):
    q, k, v = inputs(tq=8, tk=13, hq=heads[0], hkv=heads[1])
    options = dict(CASES[case])
    slopes = alibi_slopes(heads[0]) if options.pop("alibi", False) else None
    out = softmax_attention(q, k, v, **options, alibi_slopes=slopes, query_offset=offset, implementation=implementation)
    expected = brute_force(q, k, v, **options, slopes=slopes, offset=offset)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_of_another_head_dim(implementation):
    q, k, v = inputs(dv=3)
    out = softmax_attention(q, k, v, implementation=implementation)
    torch.testing.assert_close(out, brute_force(q, k, v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alibi", [False, True])
def test_low_precision_is_close_and_keeps_its_dtype(implementation, dtype, alibi):
    q, k, v = inputs(tq=37, tk=37, dtype=dtype)
    slopes = alibi_slopes(4) if alibi else None
    out = softmax_attention(q, k, v, alibi_slopes=slopes, implementation=implementation)
    assert out.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), brute_force(q, k, v, slopes=slopes), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["plain", "window", "alibi"])
@pytest.mark.parametrize("offset", [0, 2])
def test_gradient_by_finite_differences(implementation, case, offset):
    q, k, v = (x.requires_grad_() for x in inputs(tq=4, tk=6, hq=4, hkv=2, d=3, dv=3))
    options = dict(CASES[case])
    slopes = alibi_slopes(4).double() if options.pop("alibi", False) else None

    def op(q, k, v):
        return softmax_attention(
            q, k, v, **options, alibi_slopes=slopes, query_offset=offset, implementation=implementation
        )

    assert torch.autograd.gradcheck(op, (q, k, v))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["plain", "window", "alibi"])
def test_query_offset(implementation, case):
    q, k, v = inputs(tq=37, tk=37)
    options = dict(CASES[case])
    slopes = alibi_slopes(4) if options.pop("alibi", False) else None
    options.update(alibi_slopes=slopes, implementation=implementation)
    whole = softmax_attention(q, k, v, **options)
    part = softmax_attention(q[:, 11:25], k, v, query_offset=11, **options)
    torch.testing.assert_close(part, whole[:, 11:25], rtol=1e-12, atol=1e-13)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of torch's fused kernels on a GPU")
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 100])
@pytest.mark.parametrize("hkv", [4, 2, 1])
def test_a_window_of_few_queries_on_a_gpu(length, hkv, dtype, limit):
    """A mask with rows of odd lengths, in the forward and backward pass."""
    drawn = [x.to("cuda", dtype) for x in inputs(length, length, hkv=hkv, d=16, dv=16)]
    upstream = torch.randn(2, length, 4, 16, device="cuda").to(dtype)

    def run(name, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in drawn]
        out = softmax_attention(*leaves, window=22, implementation=name)
        return [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    for name, found, exact in zip("oqkv", run("sdpa", dtype), run("reference", torch.float64), strict=True):
        # With one query, the gradient of the softmax is zero.
        assert float((found - exact).detach().norm() / exact.detach().norm().clamp_min(0.1)) < limit, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_does_not_lower_the_precision(implementation):
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = softmax_attention(q, k, v, implementation=implementation)
    torch.testing.assert_close(out.double(), brute_force(q, k, v), rtol=2e-6, atol=2e-6)


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    # The ALiBi authors' code for 12 heads: the slopes of 8 heads, then the 1st, 3rd, 5th and 7th of 16.
    odd = [2.0 ** (-0.5 * i) for i in (1, 3, 5, 7)]
    assert alibi_slopes(12).tolist() == pytest.approx([2.0**-i for i in range(1, 9)] + odd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"query_offset": 1}, "query_offset is 1, so 13 queries end at position 14, beyond the 13 keys"),
        ({"query_offset": -1}, "query_offset is -1"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \[3\]"),
        ({"implementation": "triton"}, "implementation is 'triton'"),
        ({"k": torch.zeros(2, 13, 3, 6, dtype=torch.float64)}, "v has shape"),
        ({"v": torch.zeros(2, 13, 2, 6)}, "v has dtype torch.float32"),
        ({"q": torch.zeros(2, 13, 3, 6, dtype=torch.float64)}, "q has 3 heads"),
        ({"q": torch.zeros(2, 13, 4, 5, dtype=torch.float64)}, "match batch and head_dim of q"),
        ({"q": torch.zeros(2, 13, 6)}, r"q has shape \[2, 13, 6\]"),
        ({"q": torch.zeros(2, 13, 4, 6, dtype=torch.int64)}, "q has dtype torch.int64"),
        ({"q": torch.zeros(2, 0, 4, 6, dtype=torch.float64)}, "at least one element"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip("qkv", inputs(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        softmax_attention(**arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch's fused kernels need a GPU")
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [63, 1000, 2048])
def test_matches_the_reference_on_a_gpu(length, head_dim, groups):
    drawn = [x.cuda() for x in inputs(length, length, 4, groups, head_dim, head_dim, torch.bfloat16)]
    upstream = torch.randn(2, length, 4, head_dim, device="cuda").bfloat16()

    def run(name, dtype):
        q, k, v = (x.to(dtype).requires_grad_() for x in drawn)
        out = softmax_attention(q, k, v, implementation=name)
        return [x.double() for x in (out, *torch.autograd.grad(out, (q, k, v), upstream.to(dtype)))]

    for found, expected in zip(run("sdpa", torch.bfloat16), run("reference", torch.float64), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch's fused kernels need a GPU")
@pytest.mark.parametrize("length", [2048, 4096])
def test_long_sequences_use_cudnn_from_hopper_on(length):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("before Hopper torch chooses")
    q, k, v = (x.cuda().requires_grad_() for x in inputs(length, length, 4, 4, 128, 128, torch.bfloat16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        softmax_attention(q, k, v).sum().backward()
    assert any("cudnn" in event.key.lower() for event in profile.key_averages())
