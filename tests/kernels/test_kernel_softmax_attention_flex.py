"""FlexAttention form of `softmax_attention`: its mask compared with torch's, its values with the reference."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from kernels.softmax_attention import alibi_slopes, softmax_attention
from kernels.softmax_attention.flex import visible_blocks

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(64, 64, 0), (300, 300, 0), (512, 512, 0), (200, 900, 130), (1, 129, 128)]
)
@pytest.mark.parametrize("window", [None, 1, 32, 128, 200, 256])
def test_mask_matches_torch(queries, keys, offset, window):
    mask = visible_blocks(queries, keys, window, offset, torch.device("cpu"))

    def visible(b, h, t, s):
        seen = s <= t + offset
        return seen if window is None else seen & (s > t + offset - window)

    torch_mask = create_block_mask(visible, None, None, queries, keys, device="cpu")
    assert mask.shape == torch_mask.shape
    assert mask.to_dense().equal(torch_mask.to_dense())
    assert mask.full_kv_num_blocks.equal(torch_mask.full_kv_num_blocks)


def draw(queries, keys, heads, groups, dtype, value_dim=16):
    gen = torch.Generator().manual_seed(queries)
    shapes = [(2, queries, heads, 16), (2, keys, groups, 16), (2, keys, groups, value_dim)]
    return [torch.randn(*shape, generator=gen).to(DEVICE, dtype) for shape in shapes]


CASES = [
    {},
    {"window": 40},
    {"window": 129, "query_offset": 70},
    {"alibi": True},
    {"alibi": True, "window": 17, "query_offset": 70},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [4, 2])
def test_values_match_the_reference(case, groups):
    options = dict(case)
    q, k, v = draw(150, 220, 4, groups, torch.float32)
    slopes = alibi_slopes(4).to(DEVICE) if options.pop("alibi", False) else None
    with torch.no_grad():
        found, expected = (
            softmax_attention(q, k, v, **options, scale=0.4, alibi_slopes=slopes, implementation=name)
            for name in ("flex", "reference")
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="FlexAttention has no gradient on a CPU")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("length", [20, 100, 1000])
def test_gradients_match_the_reference(case, groups, length):
    options = dict(case)
    drawn = draw(length, length + 100, 4, groups, torch.bfloat16, value_dim=32)
    slopes = alibi_slopes(4).to(DEVICE) if options.pop("alibi", False) else None
    upstream = torch.randn(2, length, 4, 32, device=DEVICE).bfloat16()

    def run(name, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in drawn]
        out = softmax_attention(*inputs, **options, alibi_slopes=slopes, implementation=name)
        return [x.double() for x in (out, *torch.autograd.grad(out, inputs, upstream.to(dtype)))]

    for found, expected in zip(run("flex", torch.bfloat16), run("reference", torch.float64), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 5e-3


def test_unsupported_inputs_raise():
    q = torch.zeros(1, 3, 1, 8)
    with pytest.raises(ValueError, match=r"^implementation is 'flex', but q has head_dim 8: give 16 to 256$"):
        softmax_attention(q, q, q, implementation="flex")
    q = torch.zeros(1, 3, 1, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^implementation is 'flex', but q has dtype torch.float64: convert"):
        softmax_attention(q, q, q, implementation="flex")
