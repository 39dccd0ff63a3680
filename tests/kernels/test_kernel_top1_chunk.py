"""Top-1 Chunk, compared with loops written from its definition, as a whole and part by part."""

import math

import numpy as np
import pytest
import torch

from kernels.top1_chunk import top1_chunk_attention
from kernels.top1_chunk.reference import select_chunks, selection_mask

SCORES = ["approx", "exact", "exact_lse"]


def brute_force(q, k, v, size, top_k=1, score="exact", local=True, scale=None, offset=0, choice=None):
    """Attend query by query. `choice` gives the selected chunks, so that none are scored."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    batch, tq, hq, d = q.shape
    group = hq // k.shape[2]
    scale = d**-0.5 if scale is None else scale
    out = np.zeros((batch, tq, hq, v.shape[3]))
    chosen = np.full((batch, tq, hq, top_k), -1, dtype=np.int64)
    for b, i, h in np.ndindex(batch, tq, hq):
        t, kv = offset + i, h // group
        own = t // size
        if choice is None:
            ranks = ranked_chunks(q[b, i, h], k[b, :, kv], own, size, score, scale)[:top_k]
        else:
            ranks = [int(c) for c in choice[b, i, h] if c >= 0]
        chosen[b, i, h, : len(ranks)] = ranks
        seen = [j for c in ranks for j in range(c * size, (c + 1) * size)]
        if local or own == 0:
            seen += range(own * size, t + 1)
        s = np.array([scale * float(q[b, i, h] @ k[b, j, kv]) for j in seen])
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        out[b, i, h] = sum(w * v[b, j, kv] for w, j in zip(p, seen, strict=True))
    return torch.from_numpy(out), torch.from_numpy(chosen)


def ranked_chunks(q, k, own, size, score, scale):
    scores = []
    for c in range(own):
        keys = [k[j] for j in range(c * size, (c + 1) * size)]
        products = [float(q @ key) for key in keys]
        if score == "approx":
            scores.append(float(q @ (sum(keys) / size)))
        elif score == "exact":
            scores.append(max(products))
        else:
            scores.append(math.log(sum(math.exp(scale * x) for x in products)))
    return sorted(range(own), key=lambda c: (-scores[c], c))


def inputs(tq=37, tk=37, hq=4, hkv=2, d=5, dv=7, dtype=torch.float64, ties=False, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape, whole):
        if whole:
            return torch.randint(-1, 2, shape, generator=gen).to(dtype)
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    return draw(2, tq, hq, d, whole=ties), draw(2, tk, hkv, d, whole=ties), draw(2, tk, hkv, dv, whole=False)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("length", "size"), [(37, 8), (16, 8), (7, 8), (11, 1)])
def test_matches_the_definition(score, top_k, local, heads, length, size):
    q, k, v = inputs(tq=length, tk=length, hq=heads[0], hkv=heads[1])
    options = {"top_k": top_k, "score": score, "local": local}
    out, chosen = top1_chunk_attention(q, k, v, chunk_size=size, return_selection=True, **options)
    expected, expected_chosen = brute_force(q, k, v, size, **options)
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("score", ["approx", "exact"])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_chunk(score, top_k, dtype):
    # With integers and chunks of 4 keys, products and means are exact, so equal scores are bit-identical.
    q, k, v = inputs(d=2, dtype=dtype, ties=True)
    _, chosen = top1_chunk_attention(q, k, v, chunk_size=4, top_k=top_k, score=score, return_selection=True)
    _, expected = brute_force(q, k, v, 4, top_k=top_k, score=score)
    assert torch.equal(chosen, expected)


@pytest.mark.parametrize("score", SCORES)
def test_equal_chunks_are_selected_in_order(score):
    q, k, v = torch.ones(1, 20, 1, 3), torch.ones(1, 20, 1, 3), torch.randn(1, 20, 1, 3)
    _, chosen = top1_chunk_attention(q, k, v, chunk_size=4, top_k=3, score=score, return_selection=True)
    rows = chosen[0, :, 0].tolist()
    assert rows[3] == [-1, -1, -1]
    assert rows[4] == [0, -1, -1]
    assert rows[8] == [0, 1, -1]
    assert rows[19] == [0, 1, 2]


def test_exact_scores_are_not_rounded_to_bf16():
    # The best products of the two chunks differ by less than the precision of bf16.
    k = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9], [0.0, 0.0]], dtype=torch.bfloat16).reshape(1, 3, 1, 2)
    q = torch.ones(1, 3, 1, 2, dtype=torch.bfloat16)
    _, chosen = top1_chunk_attention(q, k, k, chunk_size=1, return_selection=True)
    assert chosen[0, 2, 0].tolist() == [1]


def test_a_scale_cannot_make_two_different_chunks_equal():
    # Adjacent fp32 values just below 2. Scaled to just above a power of two, half of the pairs round to the same value.
    k = torch.tensor([2.0 - 2.0**-22, 2.0 - 2.0**-23, 0.0]).reshape(1, 3, 1, 1)
    scales = [1.0 + i / 100 for i in range(1, 50)]
    assert any(torch.equal(*(k * scale).flatten()[:2]) for scale in scales)
    for scale in scales:
        _, chosen = top1_chunk_attention(torch.ones_like(k), k, k, chunk_size=1, scale=scale, return_selection=True)
        assert chosen[0, 2, 0].tolist() == [1]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("offset", [0, 5, 16])
def test_query_offset(score, local, offset):
    q, k, v = inputs()
    options = {"chunk_size": 8, "top_k": 2, "score": score, "local": local, "return_selection": True}
    whole, whole_chosen = top1_chunk_attention(q, k, v, **options)
    part, part_chosen = top1_chunk_attention(q[:, offset : offset + 14], k, v, query_offset=offset, **options)
    assert torch.equal(part_chosen, whole_chosen[:, offset : offset + 14])
    torch.testing.assert_close(part, whole[:, offset : offset + 14], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_close(score, dtype):
    q, k, v = inputs(dtype=dtype)
    out, chosen = top1_chunk_attention(q, k, v, chunk_size=8, score=score, return_selection=True)
    # The chunks chosen in lower precision are given, as float64 may decide a near tie differently.
    expected, _ = brute_force(q, k, v, 8, choice=chosen)
    assert out.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("local", [True, False])
def test_gradient_by_finite_differences(score, local):
    # gradcheck perturbs inputs by 1e-6. Random scores differ by much more, so the choice is unchanged.
    q, k, v = (x.requires_grad_() for x in inputs(tq=8, tk=11, d=3, dv=2))

    def op(q, k, v):
        out, selection = top1_chunk_attention(q, k, v, chunk_size=4, top_k=2, score=score, local=local, query_offset=3)
        assert selection is None
        return out

    assert torch.autograd.gradcheck(op, (q, k, v))


def test_parts_of_the_op_match_the_whole():
    q, k, _ = inputs()
    chosen = select_chunks(q, k, chunk_size=8, top_k=2, score="exact", scale=1.0, query_offset=0)
    mask = selection_mask(chosen, q, k, chunk_size=8, local=True, query_offset=0)
    for b, t, h, j in np.ndindex(2, 37, 4, 37):
        in_choice = j // 8 in chosen[b, t, h].tolist()
        in_own = j // 8 == t // 8 and j <= t
        assert bool(mask[b, h, t, j]) == (in_choice or in_own)


def test_selection_has_no_gradient():
    q, k, _ = (x.requires_grad_() for x in inputs())
    assert not select_chunks(q, k, chunk_size=8, top_k=1, score="approx", scale=1.0, query_offset=0).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 48}, "chunk_size is 48: give a power of two"),
        ({"top_k": 17}, "top_k is 17: give at most 16"),
        ({"cu_seqlens": torch.tensor([0, 37])}, "a batch of 2: pack the documents into one row"),
        ({"cu_seqlens": torch.tensor([0.0, 37.0])}, "dtype torch.float32: give whole numbers"),
        ({"implementation": "triton", "chunk_size": 16}, "but chunk_size is 16: give one of .32, 64"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"score": "mean"}, "score is 'mean': use one of"),
        ({"scale": 0.0}, "scale is 0.0: give a positive number"),
        ({"query_offset": 3}, "query_offset is 3"),
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
        pytest.param(
            {"implementation": "triton"},
            "implementation is 'triton', but q has dtype torch.float64",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there, the inputs are on the CPU"),
        ),
    ],
)
def test_invalid_arguments_raise(change, message):
    q, k, v = inputs()
    with pytest.raises(ValueError, match=message):
        top1_chunk_attention(q, k, v, **change)
