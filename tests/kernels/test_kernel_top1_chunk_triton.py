"""Top-1 Chunk's Triton kernels, compared with its reference in float64: on a GPU, or in Triton's interpreter.

Queries and keys are integers or multiples of a half, so that products, and means of 32 to 128 keys, are exact in every
dtype and order of summation. Choices, ties included, must then be identical.
"""

import itertools

import pytest
import torch
from covering import cases, kernel_cases
from triton_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    ON_GPU,
    TOLERANCE,
    draw,
    needs_gpu,
    poison,
    relative_rms,
    sort_small_blocks,
)

pytest.importorskip("triton")

from kernels.top1_chunk import top1_chunk_attention, triton_launch, triton_launch_order
from kernels.top1_chunk.chunks import Layout, chunk_table
from kernels.top1_chunk.op import top1_chunk, top1_chunk_backward
from kernels.top1_chunk.reference import chunk_scores
from kernels.top1_chunk.triton_problem import Problem

__all__ = ["poison"]  # imported as a fixture

# In the interpreter, masked lanes compute infinities and NaN with numpy, which warns about them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCORES = ["approx", "exact", "exact_lse"]

if ON_GPU:
    LENGTHS = (1, 63, 128, 129, 1000, 4096, 5001)
    CASES = [(t, 64, 128, dtype) for t in LENGTHS for dtype in (BF16, FP32)]
    CASES += [(1000, d, 128, dtype) for d in (32, 80, 96, 128, 192, 256) for dtype in (BF16, FP16)]
    CASES += [(2100, d, size, BF16) for d in (64, 128, 256) for size in (32, 64, 256, 512)]
    CASES += [(600, 128, 64, FP32), (600, 256, 256, FP32)]  # few, as products without tensor cores compile slowly
    CASES = [(*case, score) for case in CASES for score in SCORES]
    CHOICES = list(itertools.product([2, 16], [True, False], SCORES))
    GROUPS = [(2, heads, s) for heads in ((4, 4), (4, 1), (8, 1), (16, 1), (16, 2)) for s in ("approx", "exact")]
else:
    CASES = [(1, 16, 32, FP32), (70, 20, 32, FP32), (150, 16, 64, FP16), (100, 80, 32, BF16)]
    CASES = cases(
        every=[(*case, score) for case in CASES for score in SCORES],
        default=[(*case, score) for case, score in zip(CASES, ["approx", "exact_lse", "exact", "approx"], strict=True)],
    )
    # The own chunk is independent of how the others are chosen.
    CHOICES = [(2, True, "approx"), (2, False, "exact"), (2, True, "exact_lse")]
    GROUPS = cases(
        every=[(2, (4, 2), "exact"), (2, (3, 1), "approx"), (1, (3, 1), "exact"), (1, (3, 1), "approx")],
        default=[(2, (4, 2), "exact"), (1, (3, 1), "approx")],
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use small blocks in the interpreter, so that short inputs have several and sorts do not take seconds."""
    sort_small_blocks(monkeypatch)
    if not ON_GPU:
        monkeypatch.setattr(triton_launch, "backward_segment", lambda problem: 32)


def run(tensors, implementation, **options):
    """Return the output, the choice and the gradients of q, k and v."""
    *inputs, grad = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, chosen = top1_chunk_attention(*inputs, return_selection=True, implementation=implementation, **options)
    return out, chosen, torch.autograd.grad(out, inputs, grad)


def check(tensors, **options):
    """Compare all results with the reference, and return the choice and the gradients."""
    dtype = tensors[0].dtype
    out, chosen, gradients = run(tensors, "triton", **options)
    expected_out, expected_chosen, expected = run([x.double() for x in tensors], "reference", **options)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen, expected_chosen)
    assert out.dtype == dtype
    assert relative_rms(out, expected_out) < TOLERANCE[dtype]
    for name, x, actual, target in zip("qkv", tensors, gradients, expected, strict=False):
        assert actual.dtype == dtype
        assert actual.shape == x.shape
        assert relative_rms(actual, target) < TOLERANCE[dtype], f"gradient of {name}"
    return chosen, gradients


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("length", "d", "size", "dtype", "score"), CASES)
def test_matches_the_reference(length, d, size, dtype, score):
    # Integers for the mean, so that rounding it to the inputs' dtype changes nothing.
    check(draw(length, d=d, dtype=dtype, step=1.0 if score == "approx" else 0.5), chunk_size=size, score=score)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("top_k", "local", "score"), CHOICES)
def test_several_choices(top_k, local, score):
    if (score, top_k) == ("exact_lse", 16):
        pytest.skip("of so many sums of exponentials some differ by less than fp32 resolves")
    length = 1500 if ON_GPU else 110
    check(draw(length, heads=(1, 1), step=1.0), chunk_size=32, top_k=top_k, local=local, score=score)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("batch", "heads", "score"), GROUPS)
def test_batches_and_groups_of_heads(batch, heads, score):
    check(draw(1000 if ON_GPU else 75, heads=heads, batch=batch, step=1.0), chunk_size=32, score=score)


def test_without_the_own_chunk():
    check(draw(100), chunk_size=32, local=False)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("tq", "tk", "offset"),
    kernel_cases(every=[(40, 100, 0), (40, 100, 33), (1, 70, 69), (30, 100, 64)], default=[(40, 100, 33), (1, 70, 69)]),
)
def test_a_part_of_the_queries(tq, tk, offset):
    check(draw(tq, tk, batch=2), chunk_size=32, query_offset=offset)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("bounds", "tq", "offset"),
    kernel_cases(
        every=[([0, 1, 40, 40, 41, 110], 110, 0), ([0, 1, 40, 40, 41, 110], 60, 30), ([0, 32, 64, 110], 60, 30)],
        default=[([0, 1, 40, 40, 41, 110], 60, 30), ([0, 32, 64, 110], 60, 30)],
    ),
)
def test_packed_documents(bounds, tq, offset):
    check(draw(tq, 110), chunk_size=32, query_offset=offset, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize(
    ("score", "top_k"),
    kernel_cases(every=itertools.product(["approx", "exact"], [1, 2]), default=[("approx", 2), ("exact", 1)]),
)
def test_many_ties(score, top_k):
    tensors = draw(140, heads=(1, 1), d=16, step=1.0)
    tensors[:2] = [x.clamp(-1, 1) for x in tensors[:2]]
    check(tensors, chunk_size=32, score=score, top_k=top_k)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("length", [100, *([20_000] if ON_GPU else [])])
def test_one_chunk_that_every_query_chooses(length):
    q, k, v, grad = draw(length, heads=(2, 1), dtype=FP32 if length < 1000 else BF16)
    q[..., 0], k[..., 0], k[:, :32, :, 0] = 3.0, 0.0, 30.0
    if length < 1000:
        chosen, gradients = check([q, k, v, grad], chunk_size=32)
    else:
        _, chosen, gradients = run([q, k, v, grad], "triton", chunk_size=32)
    assert chosen[:, 32:].unique().tolist() == [0]
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("score", kernel_cases(every=SCORES, default=["exact_lse"]))
def test_two_runs_are_bitwise_equal(score):
    tensors = draw(3000 if ON_GPU else 45, dtype=BF16)
    first, second = (run(tensors, "triton", chunk_size=32, score=score) for _ in range(2))
    for a, b in zip(itertools.chain(first[:2], first[2]), itertools.chain(second[:2], second[2]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("score", "dtype"),
    kernel_cases(
        every=itertools.product(["approx", "exact"], [FP32, BF16]), default=[("approx", BF16), ("exact", FP32)]
    ),
)
def test_chosen_chunk_of_arbitrary_inputs_scores_best(score, dtype):
    gen = torch.Generator().manual_seed(torch.seed())
    length = 4000 if ON_GPU else 100
    q, k, v = (torch.randn(1, length, 2, 16, generator=gen).to(DEVICE, dtype) for _ in range(3))
    _, chosen = top1_chunk_attention(
        q, k, v, chunk_size=32, score=score, return_selection=True, implementation="triton"
    )
    scores = chunk_scores(q.double(), k.double(), chunk_size=32, score=score, scale=1.0)
    earlier = torch.arange(scores.shape[-1], device=DEVICE) < torch.arange(length, device=DEVICE)[:, None] // 32
    best = scores.masked_fill(~earlier, -torch.inf).amax(dim=-1)[:, :, 32:]
    actual = scores.gather(-1, chosen.transpose(1, 2).clamp(min=0))[:, :, 32:, 0]
    rounding = 2**-8 if (score, dtype) == ("approx", BF16) else 2**-20  # the mean is rounded to the inputs' dtype
    size = q.double().norm(dim=-1).transpose(1, 2)[:, :, 32:] * k.double().norm(dim=-1).max()
    assert (best - actual <= rounding * size).all()


def test_nan_query_does_not_affect_others():
    tensors = draw(100, heads=(1, 1))
    clean, _, _ = run(tensors, "triton", chunk_size=32)
    tensors[0][0, 50] = torch.nan
    out, _ = top1_chunk_attention(*tensors[:3], chunk_size=32, return_selection=True, implementation="triton")
    others = torch.arange(100) != 50
    assert torch.equal(out[:, others], clean[:, others])


def test_infinite_scores_cause_no_nan():
    q, k, v, grad = draw(100, heads=(1, 1))
    # Later queries' products with the first chunk are below fp32's range. It is the only candidate of some queries.
    q[..., 0], q[:, :32, :, 0], k[..., 0], k[:, :32, :, 0] = 3e20, 0.0, 0.0, -3e20
    out, chosen, gradients = run([q, k, v, grad], "triton", chunk_size=32)
    assert chosen[0, 32:64, 0, 0].tolist() == [0] * 32
    for x in (out, *gradients):
        assert x.isfinite().all()


def test_inputs_need_not_be_contiguous():
    tensors = draw(40, batch=2)
    expected = run(tensors, "triton", chunk_size=32)[0]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    assert not strided[0].is_contiguous()
    assert torch.equal(run(strided, "triton", chunk_size=32)[0], expected)


@pytest.mark.parametrize("bounds", [None, [0, 7, 34]])
def test_operators_pass_opcheck(bounds):
    q, k, v, grad = draw(34)
    bounds = None if bounds is None else torch.tensor(bounds)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(top1_chunk, (*inputs, bounds, None, 32, 1, "approx", True, 0.25, 0))
    results = [x.detach() for x in top1_chunk(*inputs, bounds, None, 32, 1, "exact", True, 0.25, 0)]
    inputs = [x.detach() for x in inputs]
    torch.library.opcheck(top1_chunk_backward, (grad, *inputs, *results, bounds, 32, True, 0.25, 0))


def test_activation_checkpointing():
    *inputs, grad = draw(40)
    inputs = [x.requires_grad_() for x in inputs]

    def op(q, k, v):
        return top1_chunk_attention(q, k, v, chunk_size=32, implementation="triton")[0]

    expected = torch.autograd.grad(op(*inputs), inputs, grad)
    again = torch.utils.checkpoint.checkpoint(op, *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again, inputs, grad), expected, strict=True):
        assert torch.equal(a, b)


@needs_gpu
@pytest.mark.parametrize("bounds", [None, [0, 100, 300]])
def test_compiles_without_a_graph_break(bounds):
    *inputs, grad = draw(300, dtype=BF16)
    inputs = [x.requires_grad_() for x in inputs]
    bounds = None if bounds is None else torch.tensor(bounds)

    def op(q, k, v):
        return top1_chunk_attention(q * 1.5, k, v, chunk_size=32, cu_seqlens=bounds)[0] + 1

    expected, actual = op(*inputs), torch.compile(op, fullgraph=True)(*inputs)
    assert torch.allclose(actual, expected, rtol=2**-7, atol=2**-7)
    for a, b in zip(*(torch.autograd.grad(x, inputs, grad) for x in (actual, expected)), strict=True):
        assert relative_rms(a, b.double()) < 0.02


@needs_gpu
def test_more_elements_than_int32_holds():
    # q exceeds 2^31 elements at token 131,072. The last tokens are compared with those of a short input.
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    heads, length = 128, 135_000
    q, k, v = (torch.randn(1, length, heads, 128, device=DEVICE, dtype=BF16) for _ in range(3))
    bounds = torch.tensor([0, length - 1000, length])
    out, chosen = top1_chunk_attention(q, k, v, score="approx", cu_seqlens=bounds, return_selection=True)
    short, short_chosen = top1_chunk_attention(
        *(x[:, -1000:] for x in (q, k, v)), score="approx", return_selection=True
    )
    assert torch.equal(chosen[:, -1000:], short_chosen)
    assert torch.equal(out[:, -1000:], short)


@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 21, 40]])
@pytest.mark.parametrize(("num_queries", "offset"), [(40, 0), (7, 0), (9, 6), (3, 37)])
def test_chunk_table(num_queries, offset, bounds):
    size, batch = 8, 1 if bounds else 2
    table = chunk_table(Layout(batch, num_queries, 40, offset, size), bounds, torch.device("cpu")).tolist()
    documents = [(b * 40, s, e) for b in range(batch) for s, e in itertools.pairwise(bounds or [0, 40])]
    expected, slot = [], 0
    for base, start, end in documents:
        first = slot
        for key in range(start, end, size):
            keys = range(key, min(key + size, end))
            own = [t for t in keys if offset <= t < offset + num_queries]
            row = base // 40 * num_queries
            expected.append((base + key, len(keys), first, [row + t - offset for t in own], [t - key for t in own]))
            slot += 1
    assert len(table) == len(expected)
    for entry, (key_start, key_count, first, queries, positions) in zip(table, expected, strict=True):
        assert [entry[0], entry[1], entry[3], entry[5]] == [key_start, key_count, len(queries), first]
        if queries:
            assert (entry[2], entry[4]) == (queries[0], positions[0])


def test_order_and_segments():
    gen = torch.Generator().manual_seed(0)
    slots, num_groups, rows = 5, 3, 100
    chosen = torch.randint(-1, slots, (num_groups, rows), generator=gen, dtype=torch.int32).to(DEVICE)
    table = torch.zeros(slots, 6, dtype=torch.int32, device=DEVICE)
    problem = Problem(table, Layout(1, rows, 160, 0, 32), num_groups, num_groups, 16, FP32, 1.0, True, 160)
    grouped = triton_launch_order.order_by_chunk(problem, chosen)
    order, ends = grouped.rows, grouped.ends[:, -1]
    expected = [
        [r for r in range(rows) if chosen[g, r] == slot] for g in range(num_groups) for slot in [*range(slots), -1]
    ]
    begin = 0
    for i, (end, target) in enumerate(zip(ends.tolist(), expected, strict=True)):
        if i % (slots + 1) < slots:  # the order of queries that chose no chunk does not matter
            assert order[begin:end].tolist() == target
        begin = end
    segments = triton_launch_order.cut_into_segments(problem, grouped, 8, chosen.numel())
    items = [item for item in segments.items.tolist() if item[0] < item[1]]
    expected_items, parts = [], 0
    for i, target in enumerate(expected):
        slot = i % (slots + 1)
        for first in range(0, len(target) if slot < slots else 0, 8):
            several = len(target) > 8
            expected_items.append((target[first : first + 8], i // (slots + 1), parts if several else -1, slot))
            parts += several
    assert [(order[begin:end].tolist(), g, part, slot) for begin, end, g, _, part, slot in items] == expected_items
    assert 0 < parts <= segments.num_parts
    assert segments.part_ends[-1] == parts
