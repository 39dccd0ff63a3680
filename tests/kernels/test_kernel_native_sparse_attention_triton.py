"""Native Sparse Attention's Triton form, compared with its reference in float64: on a GPU, or in Triton's interpreter.

Queries and keys are integers, so that means of blocks of 32 to 128 keys are exact in every dtype and choices do not
depend on rounding. FlexAttention has no gradient on a CPU. There the whole op uses plain torch for the compressed
branch, and a separate test compares FlexAttention with it.
"""

import pytest
import torch
from covering import cases, kernel_cases
from torch.nn.attention.flex_attention import create_block_mask
from triton_cases import BF16, DEVICE, FP16, FP32, ON_GPU, TOLERANCE, draw, needs_gpu, poison, relative_rms

pytest.importorskip("triton")

from kernels.common.attention_math import mix_values, query_key_products
from kernels.common.dispatch import Choice, recorded_choices
from kernels.common.triton_math import Tiles
from kernels.native_sparse_attention import branches, native_sparse_attention, selected, triton_launch
from kernels.native_sparse_attention.compressed import (
    Compressed,
    attend_compressed,
    ended_blocks,
    rounded_block_means,
)
from kernels.native_sparse_attention.op import choose_blocks
from kernels.native_sparse_attention.reference import block_means, compressed_probabilities, select_blocks
from kernels.top1_chunk import triton_launch as triton_launch_chunk
from kernels.top1_chunk.triton_launch_order import Order

__all__ = ["poison"]  # imported as a fixture

pytestmark = [
    # In the interpreter, masked lanes compute infinities and NaN with numpy, which warns about them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def plain_compressed(q, k, v, *, block_size, scale, query_offset):
    """Compute `attend_compressed` from the reference's parts."""
    options = {"block_size": block_size, "scale": scale, "query_offset": query_offset}
    probabilities = compressed_probabilities(q, k, **options)
    t, n = torch.arange(q.shape[1], device=q.device)[:, None], torch.arange(k.shape[1], device=q.device)
    unseen = (n + 1) * block_size > t + query_offset + 1
    lse = (query_key_products(q, k) * scale).masked_fill(unseen, -torch.inf).logsumexp(-1)
    return Compressed(mix_values(probabilities, v), lse.float())


def rows_by_choice(problem, chosen_gr):
    """Replace `order_by_chunk` of Top-1 Chunk, whose sorts take seconds in the interpreter."""
    num_groups, rows = chosen_gr.shape
    bins = problem.slots + 1
    bin_gr = chosen_gr.where(chosen_gr >= 0, problem.slots) + bins * torch.arange(num_groups)[:, None]
    ends = bin_gr.flatten().bincount(minlength=num_groups * bins).cumsum(0)
    return Order((bin_gr.flatten().argsort(stable=True) % rows).int(), ends[:, None].int())


@pytest.fixture(autouse=True)
def for_the_interpreter(monkeypatch):
    """Use a branch with a gradient, short (so several) segments and few programs in the interpreter."""
    if not ON_GPU:
        monkeypatch.setattr(branches, "attend_compressed", plain_compressed)
        monkeypatch.setattr(selected, "MAX_MASKED_RATIO", 0)
        monkeypatch.setattr(triton_launch_chunk, "order_by_chunk", rows_by_choice)
        monkeypatch.setattr(triton_launch_chunk, "backward_segment", lambda problem: 128)
        monkeypatch.setitem(triton_launch.TILES, FP32, Tiles(256, 16, 4, 1))


def draw_gates(q):
    gen = torch.Generator().manual_seed(1)
    return torch.rand(*q.shape[:3], 3, generator=gen).to(q.device)


def run(tensors, implementation, **options):
    """Return the output and the gradients of q, k, v and the gates."""
    *inputs, grad = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = native_sparse_attention(*inputs, implementation=implementation, **options)
    return out, *torch.autograd.grad(out, inputs, grad)


def check(q, k, v, grad, **options):
    tensors = [q, k, v, draw_gates(q), grad]
    found = run(tensors, "triton", **options)
    expected = run([x.double() for x in tensors], "reference", **options)
    for name, of, actual, target in zip(("out", "q", "k", "v", "gates"), (v, *tensors), found, expected, strict=False):
        assert actual.dtype == of.dtype
        assert relative_rms(actual, target) < TOLERANCE[q.dtype], name


CASES = [  # length, block size, blocks selected, query heads, key heads, head dim, dtype
    (1, 64, 3, 4, 1, 16, FP32),
    (63, 64, 16, 2, 2, 16, BF16),
    (64, 64, 3, 12, 1, 20, FP32),
    (65, 64, 4, 4, 1, 16, FP16),
    (135, 32, 4, 16, 1, 16, FP32),
    (150, 32, 4, 2, 2, 16, BF16),
    (200, 64, 16, 1, 1, 16, FP32),
    (200, 32, 5, 4, 1, 16, FP16),
]
GPU_CASES = [
    (t, 64, 16, *heads, d, BF16) for t in (2048, 5001) for heads, d in (((4, 4), 64), ((4, 4), 128), ((16, 1), 128))
]
GPU_CASES += [(1000, 64, 16, 12, 1, 64, BF16), (1000, 128, 3, 8, 2, 80, FP16), (1000, 32, 17, 4, 1, 64, FP32)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("length", "size", "num_selected", "hq", "hkv", "d", "dtype"),
    [*CASES, *GPU_CASES] if ON_GPU else cases(every=CASES, default=CASES[:6]),
)
def test_matches_the_reference(length, size, num_selected, hq, hkv, d, dtype):
    tensors = draw(length, heads=(hq, hkv), d=d, dtype=dtype, step=1.0)
    check(*tensors, block_size=size, num_selected=num_selected, window=length // 3 + 1)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("tq", "tk", "offset"),
    kernel_cases(every=[(40, 130, 0), (40, 130, 57), (1, 100, 99)], default=[(40, 130, 57), (1, 100, 99)]),
)
def test_a_part_of_the_queries(tq, tk, offset):
    tensors = draw(tq, tk, batch=2, step=1.0)
    check(*tensors, block_size=32, num_selected=4, window=40, query_offset=offset, scale=0.3)


def test_two_runs_are_bitwise_equal():
    q, k, v, grad = draw(5000 if ON_GPU else 100, heads=(4, 1), dtype=BF16)
    first, second = (run([q, k, v, draw_gates(q), grad], "triton", block_size=32, num_selected=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def choice(q, k, size, num_selected, scale=1.0, offset=0):
    """Return the blocks that the kernel selects, with the own block, as bool [b, hkv, tq, blocks]."""
    means = block_means(k, size).to(k.dtype)
    _, lse = plain_compressed(q, means, means, block_size=size, scale=scale, query_offset=offset)
    earlier = choose_blocks(q, means, lse, size, num_selected - 1, scale, offset)
    own = ((offset + torch.arange(q.shape[1], device=q.device)) // size)[:, None, None].expand(*earlier.shape[:3], 1)
    listed = torch.cat([own, earlier], -1).transpose(1, 2)
    blocks = -(-k.shape[1] // size)
    taken = torch.zeros(*listed.shape[:3], blocks + 1, dtype=torch.bool, device=q.device)
    taken = taken.scatter_(-1, listed.where(listed >= 0, blocks), True)[..., :blocks]
    assert torch.equal(taken.sum(-1), (listed >= 0).sum(-1)), "none is listed twice"
    return taken


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("heads", "num_selected"),
    kernel_cases(
        every=[
            ((1, 1), 3),
            ((1, 1), 16),
            ((8, 2), 6),
            ((8, 2), 16),
            ((12, 1), 3),
            ((12, 1), 6),
            ((12, 1), 16),
            ((16, 1), 16),
        ],
        default=[((1, 1), 3), ((8, 2), 6), ((12, 1), 16)],
    ),
)
def test_selection_matches_the_reference_up_to_rounding(heads, num_selected):
    size, offset, tk = 4, 6, 8002 if ON_GPU else 130
    gen = torch.Generator().manual_seed(num_selected)
    q, k = (torch.randn(1, t, h, 16, generator=gen).to(DEVICE) for t, h in ((tk - offset, heads[0]), (tk, heads[1])))
    options = {"block_size": size, "query_offset": offset}
    of_heads = compressed_probabilities(q.double(), block_means(k, size).double(), scale=1.0, **options)
    expected = select_blocks(of_heads, q, k, num_selected=num_selected, **options)
    taken = choice(q, k, size, num_selected, offset=offset)
    assert torch.equal(taken.sum(-1), expected.sum(-1))
    assert int((taken != expected).any(-1).sum()) <= 1e-3 * taken[..., 0].numel()
    importance = torch.nn.functional.pad(of_heads.unflatten(1, (heads[1], -1)).sum(2), (0, 1))  # the partial last block
    missed = importance.masked_fill(~(expected & ~taken), -torch.inf).amax(-1)
    instead = importance.masked_fill(~(taken & ~expected), torch.inf).amin(-1)
    assert bool((missed - instead <= 1e-5).all())


def test_lowest_of_equal_blocks_is_selected():
    ones = torch.ones(1, 22, 1, 16, device=DEVICE)
    taken = choice(ones, ones, 4, 4)[0, 0]
    rows = {t: taken[t].nonzero().flatten().tolist() for t in (0, 3, 4, 8, 15, 21)}
    assert rows == {0: [0], 3: [0], 4: [0, 1], 8: [0, 1, 2], 15: [0, 1, 2, 3], 21: [0, 1, 4, 5]}


def test_selection_operator_passes_opcheck():
    q, k, _, _ = draw(70, heads=(4, 2))
    means = rounded_block_means(k, 32)
    torch.library.opcheck(choose_blocks, (q, means, torch.zeros(1, 4, 70, device=DEVICE), 32, 3, 0.25, 0))


def test_nan_query_does_not_affect_others():
    tensors = draw(100, heads=(4, 1))[:3]
    gates = draw_gates(tensors[0])
    options = {"block_size": 32, "num_selected": 4, "window": 20, "implementation": "triton"}
    clean = native_sparse_attention(*tensors, gates, **options)
    tensors[0][0, 98, 1] = torch.nan
    spoilt = native_sparse_attention(*tensors, gates, **options)
    others = torch.arange(100) != 98
    torch.testing.assert_close(spoilt[:, others], clean[:, others], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(31, 31, 0), (300, 300, 0), (200, 5000, 4790), (9000, 9000, 0)]
)
def test_mask_matches_torch(queries, keys, offset, size):
    blocks = keys // size
    if blocks == 0:
        pytest.skip("no block, no mask")
    mask = ended_blocks(queries, blocks, size, offset, torch.device("cpu"))

    def ended(b, h, t, n):
        return n < (t + offset + 1) // size

    torch_mask = create_block_mask(ended, None, None, queries, blocks, device="cpu")
    assert mask.shape == torch_mask.shape
    assert mask.to_dense().equal(torch_mask.to_dense())
    assert mask.full_kv_num_blocks.equal(torch_mask.full_kv_num_blocks)


def compressed_inputs(length, heads, dtype, d=16, size=32):
    q, k, v, grad = draw(length, heads=heads, d=d, dtype=dtype, batch=2, step=1.0)
    return q, *(rounded_block_means(x, size) for x in (k, v)), grad


@pytest.mark.parametrize("heads", [(4, 4), (12, 1)])
@pytest.mark.parametrize("length", [20, 32, 300])
def test_compressed_branch_matches_the_reference(length, heads):
    q, k, v, _ = compressed_inputs(length, heads, FP32)
    options = {"block_size": 32, "scale": 0.4, "query_offset": 0}
    with torch.no_grad():
        found, expected = attend_compressed(q, k, v, **options), plain_compressed(q, k, v, **options)
    assert not found.out_bthd[:, :31].any()
    torch.testing.assert_close(found.out_bthd, expected.out_bthd, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse_bht, expected.lse_bht, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "heads", "offset"), [(2, (2, 2), 0), (1, (12, 1), 0), (2, (4, 2), 37)])
@pytest.mark.parametrize("length", [20, 64, 300 if ON_GPU else 140])
def test_selected_branch_by_mask_matches_that_by_blocks(length, batch, heads, offset, monkeypatch):
    q, k, v, _ = draw(length, tk=length + offset, heads=heads, batch=batch, step=1.0)
    options = {"block_size": 32, "scale": 0.4, "query_offset": offset}
    probabilities = compressed_probabilities(q, rounded_block_means(k, 32), **options)
    taken = select_blocks(probabilities, q, k, num_selected=4, block_size=32, query_offset=offset)  # [b, g, t, blocks]
    own = (offset + torch.arange(length, device=DEVICE)) // 32
    earlier = taken & (torch.arange(taken.shape[3], device=DEVICE) < own[:, None])
    order = earlier.int().argsort(dim=-1, descending=True, stable=True)[..., :3]
    listed = torch.where(earlier.gather(-1, order), order, -1).transpose(1, 2)
    with torch.no_grad():
        monkeypatch.setattr(selected, "MAX_MASKED_RATIO", 100)
        by_mask = selected.attend_selected(q, k, v, listed, **options)
        monkeypatch.setattr(selected, "MAX_MASKED_RATIO", 0)
        by_blocks = selected.attend_selected(q, k, v, listed, **options)
    torch.testing.assert_close(by_mask, by_blocks, rtol=1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("heads", [(4, 4), (12, 1), (16, 1)])
@pytest.mark.parametrize("length", [300, 5001])
def test_gradients_of_the_compressed_branch(length, heads):
    *drawn, grad = compressed_inputs(length, heads, BF16, d=64)
    options = {"block_size": 32, "scale": 0.125, "query_offset": 0}

    def gradients(op, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in drawn]
        return torch.autograd.grad(op(*inputs, **options).out_bthd, inputs, grad.to(dtype))

    found, expected = gradients(attend_compressed, BF16), gradients(plain_compressed, torch.float64)
    for name, actual, target in zip("qkv", found, expected, strict=True):
        assert relative_rms(actual, target) < TOLERANCE[BF16], name


@needs_gpu
def test_memory_is_linear_in_the_length():
    def peak(length):
        *inputs, grad = draw(length, heads=(4, 1), d=64, dtype=BF16)
        torch.cuda.reset_peak_memory_stats()
        run([*inputs, draw_gates(inputs[0]), grad], "triton")
        return torch.cuda.max_memory_allocated()

    peak(4096)  # exclude one-time memory: compiled kernels and caches
    assert peak(32768) < 10 * peak(4096)


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"block_size": 16}, (1, 3, 2, 16), r"block_size is 16: give one of \[32, 64, 128, 256, 512\]"),
        ({"num_selected": 18}, (1, 3, 2, 16), "num_selected is 18: give at most 17"),
        ({}, (1, 3, 2, 8), "q has head_dim 8: give 16 to 256"),
        ({}, (1, 3, 2, 264), "q has head_dim 264: give at most 256"),
    ],
)
def test_unsupported_inputs_raise(options, shape, message):
    q = torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError, match=f"^implementation is 'triton', but {message}$"):
        native_sparse_attention(q, q, q, draw_gates(q), implementation="triton", **options)


def test_other_unsupported_inputs_raise():
    q, v = torch.zeros(1, 3, 2, 16, device=DEVICE), torch.zeros(1, 3, 2, 32, device=DEVICE)
    with pytest.raises(ValueError, match="v has head_dim 32: give that of q, 16"):
        native_sparse_attention(q, q, v, draw_gates(q), implementation="triton")
    q = q.double()
    with pytest.raises(ValueError, match=r"q has dtype torch.float64: convert it"):
        native_sparse_attention(q, q, q, draw_gates(q), implementation="triton")


def choice_of_auto(length, **options):
    q = torch.zeros(1, length, 1, 16, device=DEVICE)
    with recorded_choices() as found:
        native_sparse_attention(q, q, q, draw_gates(q), **options)
    return dict(found)["native_sparse_attention"]


def test_auto_logs_its_choice_and_the_reason():
    assert choice_of_auto(9) == Choice("reference", "only 9 queries")
    found = choice_of_auto(200)
    if ON_GPU:
        assert found == Choice("triton", "fused on CUDA")
        assert choice_of_auto(200, block_size=16).name == "reference"
    else:
        assert found == Choice("reference", "triton's kernels need a GPU, and the inputs are on cpu")
