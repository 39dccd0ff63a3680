"""Int8 screening, compared bitwise with selection by all keys in full precision: on a GPU or interpreted."""

import functools

import pytest
import torch
from covering import kernel_cases
from triton_cases import BF16, DEVICE, FP16, ON_GPU, sort_small_blocks

pytest.importorskip("triton")

from kernels.top1_chunk import top1_chunk_attention, triton_launch_choice, triton_launch_screening
from kernels.top1_chunk.op import _problem
from kernels.top1_chunk.triton_launch_screening import select_screened
from kernels.top1_chunk.triton_problem import TILES

# In the interpreter, masked lanes compute infinities and NaN with numpy, which warns about them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if ON_GPU:
    CASES = [(t, d, size, dtype) for t in (129, 5001, 20_000) for d in (64, 128) for size, dtype in [(128, BF16)]]
    CASES += [(6000, d, 128, FP16) for d in (32, 80, 96, 192, 256)]
    CASES += [(6000, 128, size, BF16) for size in (32, 64, 256, 512)]
else:
    CASES = [(150, 20, 32, BF16), (200, 32, 64, FP16)]

NAN = float("nan")  # one object, so that `kernel_cases` finds it, although it does not equal itself


def draw(t, heads, d, dtype, batch=1):
    gen = torch.Generator().manual_seed(t + d)
    shapes = [(batch, t, heads[0], d), (batch, t, heads[1], d)]
    return [torch.randn(*shape, generator=gen).to(DEVICE, dtype) for shape in shapes]


def both(q, k, size, cu_seqlens=None):
    """Return the selection by screening and the selection by all keys."""
    problem = _problem(q, k, cu_seqlens, size, True, 1.0, 0)
    flat = [x.flatten(0, 1).contiguous() for x in (q, k)]
    screened, plain = (q.new_full((1, problem.num_groups, problem.rows), -7, dtype=torch.int32) for _ in range(2))
    triton_launch_screening.select_screened(
        problem, *flat, screened, q.new_empty(problem.num_heads * problem.rows * 128)
    )
    triton_launch_choice.select_by_keys(problem, *flat, plain, lse=False)
    return screened, plain


@pytest.mark.parametrize(("t", "d", "size", "dtype"), CASES)
def test_random_keys(monkeypatch, t, d, size, dtype):
    """The final lower bounds exclude candidates of screening, and scores of the first candidates exclude others."""
    counts, order_by_chunk = [], triton_launch_screening._order_by_chunk

    def count_before_and_after(heads, candidates, statistics, *more):
        counts.append(statistics.counts.clone())
        order = order_by_chunk(heads, candidates, statistics, *more)
        counts.append(statistics.counts.clone())
        return order

    monkeypatch.setattr(triton_launch_screening, "_order_by_chunk", count_before_and_after)
    screened, plain = both(*draw(t, (2, 1), d, dtype), size)
    assert torch.equal(screened, plain)
    assert (plain >= 0).any() == (t > size)
    collected, bounded, _, scored = (int(count[counts[1] > 0].sum()) for count in counts)  # 0: nothing left to score
    assert collected > bounded > scored or t < 2 * size


class Recorder:
    """Stand-in for a kernel, which records its arguments."""

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, **options):
        self.args = args


def test_bounds_have_their_margins(monkeypatch):
    """Compare the bounds of rounded queries and keys with the norms in float64, each with its margin."""
    q, k = (x.flatten(0, 1) for x in draw(40, (2, 1), 20, BF16))
    problem = _problem(q[None], k[None], None, 32, True, 1.0, 0)
    recorder = Recorder()
    monkeypatch.setattr(triton_launch_screening.triton_screen, "screen", recorder)
    monkeypatch.setattr(triton_launch_screening, "on_hopper", lambda x: False)
    centre = k[:, 0].float().mean(0)
    triton_launch_screening.collect_candidates(triton_launch_screening.Heads(problem, 1, q, k, centre[None]), None)
    q8, query_bounds, k8, chunk_bounds = (x.double() for x in recorder.args[:4])
    margin, product_error = 1 + 2**-10, 2**-13
    close = functools.partial(torch.testing.assert_close, rtol=2**-13, atol=0)

    scaled = q.double().flatten(0, 1)
    scaled *= 127 / scaled.abs().amax(1, keepdim=True)
    error = scaled - q8[0, :, :20]
    assert error.abs().max() < 0.5 + 1e-4
    close(query_bounds[0], torch.stack([error.norm(dim=1), scaled.norm(dim=1) + error.norm(dim=1)]) * margin)
    for i, keys in enumerate(k[:, 0].double().split(32)):
        centred = keys - centre.double()
        scale = centred.abs().max() / 127
        error = centred - scale * k8[0, 32 * i : 32 * i + 32, :20]
        assert error.abs().max() < (0.5 + 1e-4) * scale
        norms = centred.norm(dim=1)
        key_error = error.norm(dim=1).max() + (norms + keys.norm(dim=1)).max() * product_error
        close(chunk_bounds[:, 0, i], torch.stack([scale, norms.max() * margin, key_error * margin]))


@pytest.mark.parametrize(("share", "least"), [(0.0, 0), (1.0, 0), (0.0, 2**28)])
def test_few_or_all_heads_at_a_time(monkeypatch, share, least):
    monkeypatch.setattr(triton_launch_screening, "MAX_SCRATCH_SHARE", share)
    monkeypatch.setattr(triton_launch_screening, "MIN_SCRATCH_BYTES", least)
    q, k = draw(70, (4, 2), 16, BF16, batch=2)
    screened, plain = both(q, k, 32)
    assert torch.equal(screened, plain)


def test_packed_documents():
    q, k = draw(150, (2, 1), 16, BF16)
    screened, plain = both(q, k, 32, torch.tensor([0, 1, 40, 40, 41, 150]))
    assert torch.equal(screened, plain)


@pytest.mark.parametrize(
    ("capacity", "survivors"),
    kernel_cases(every=[(1, 16), (3, 16), (64, 0), (64, 1), (64, 16)], default=[(1, 16), (3, 16), (64, 0), (64, 1)]),
)
def test_rows_with_more_candidates_than_capacity(monkeypatch, capacity, survivors):
    monkeypatch.setattr(triton_launch_screening, "CANDIDATES", capacity)
    monkeypatch.setattr(triton_launch_screening, "SURVIVORS", survivors)
    # On a grid, products are exact in any tile, so equal keys tie. For arbitrary values they do so only on a GPU.
    q, k = ((x * 4).round() / 4 for x in draw(180, (2, 1), 16, BF16))
    k[:, 90:120] = k[:, 40:70]  # ties between chunks
    q[:, 170:175] = 0  # all chunks tie, and there are more than three
    screened, plain = both(q, k, 32, torch.tensor([0, 40, 180]))
    assert torch.equal(screened, plain)


@pytest.mark.parametrize("capacity", [1, 64])
def test_chunks_of_several_tiles_of_keys(monkeypatch, capacity):
    monkeypatch.setattr(triton_launch_screening, "CANDIDATES", capacity)
    for kernel in ("screen", "recheck"):
        monkeypatch.setitem(TILES, (kernel, "small"), TILES[kernel, "small"]._replace(block_n=32))
    screened, plain = both(*draw(200, (2, 1), 16, BF16), 64)
    assert torch.equal(screened, plain)


def test_keys_far_from_zero_and_of_unlike_sizes():
    q, k = draw(140, (1, 1), 16, BF16)
    k = k * torch.logspace(-2, 2, 140, device=DEVICE).to(BF16)[None, :, None, None]
    k[..., 3] += 40
    screened, plain = both(q, k, 32)
    assert torch.equal(screened, plain)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's products differ in the last bit with the tile they are in")
@pytest.mark.parametrize("apart", [2**-6, 2**-8])
@pytest.mark.parametrize("centre", [0, 40])
def test_chunks_that_nearly_tie(apart, centre):
    q, k = draw(8000, (2, 1), 128, BF16)
    gen = torch.Generator().manual_seed(1)
    k[:, 4096:7168] = k[:, :3072] * (1 + apart * torch.randn(1, 3072, 1, 1, generator=gen).to(DEVICE, BF16))
    k += centre
    screened, plain = both(q, k, 128)
    assert torch.equal(screened, plain)


@pytest.mark.parametrize(
    "value",
    kernel_cases(
        every=[NAN, float("inf"), -float("inf"), 3e38, 1e25, 1e-40], default=[NAN, -float("inf"), 3e38, 1e-40]
    ),
)
def test_values_beyond_the_range_of_int8(value):
    q, k = draw(160, (2, 1), 16, BF16)
    q[0, 150, 0, 3] = value
    k[0, 70, 0, 5] = value
    screened, plain = both(q, k, 32)
    assert torch.equal(screened, plain)


@functools.cache
def choice_of_plain_sizes():
    return both(*draw(140, (2, 1), 16, BF16), 32)[1]


@pytest.mark.parametrize(("q_norm", "k_norm"), [(1, 2.0**-80), (2.0**-90, 1), (2.0**50, 2.0**50), (2.0**-60, 2.0**66)])
def test_inputs_whose_squares_overflow_or_underflow(q_norm, k_norm):
    q, k = draw(140, (2, 1), 16, BF16)
    screened, plain = both(q * q_norm, k * k_norm, 32)
    assert torch.equal(screened, plain)
    assert torch.equal(plain, choice_of_plain_sizes())


def test_long_sequences_are_screened():
    problem = _problem(*draw(128 * 256, (1, 1), 16, BF16), None, 128, True, 1.0, 0)
    # Only shapes matter here. 15 heads of 128 channels with 32,768 tokens are 2.06e12 operations.
    problem = problem._replace(num_heads=15, num_groups=15, head_dim=128)
    assert triton_launch_screening.screening_pays(problem, 1)
    assert not triton_launch_screening.screening_pays(problem.with_heads(14), 1)
    assert not triton_launch_screening.screening_pays(problem, 2)
    assert not triton_launch_screening.screening_pays(problem._replace(longest=128 * 255), 1)
    assert not triton_launch_screening.screening_pays(problem._replace(dtype=torch.float32), 1)


@pytest.mark.parametrize(("t", "heads", "d"), [(130, (2, 1), 16), (131, (1, 1), 17)])
def test_op_is_bitwise_equal(monkeypatch, t, heads, d):
    sort_small_blocks(monkeypatch)
    q, k = draw(t, heads, d, BF16)
    options = {"chunk_size": 32, "score": "exact", "implementation": "triton", "return_selection": True}
    plain = top1_chunk_attention(q, k, k, **options)
    called = []
    monkeypatch.setattr(triton_launch_screening, "MIN_CHUNKS", 1)
    monkeypatch.setattr(triton_launch_screening, "MIN_OPERATIONS", 0)
    monkeypatch.setattr(
        triton_launch_choice, "select_screened", lambda *args: called.append(1) or select_screened(*args)
    )
    screened = top1_chunk_attention(q, k, k, **options)
    assert called
    assert all(map(torch.equal, screened, plain))
