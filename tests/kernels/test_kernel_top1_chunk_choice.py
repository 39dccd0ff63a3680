"""Separate chunk selection, by mean keys or by shards of the keys, compared with selection by all keys at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from triton_cases import BF16, FP32, ON_GPU, draw, poison, sort_small_blocks

from kernels.top1_chunk import Best, best_by_keys, best_by_mean, mean_keys, merge, top1_chunk_attention

__all__ = ["poison"]  # imported as a fixture

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poison")]

SIZE, CHUNKS = 32, 4
FORMS = pytest.mark.parametrize("form", ["reference", "triton"])
SHAPES = pytest.mark.parametrize(
    ("dtype", "heads", "d", "top_k"),
    [(FP32, (4, 2), 16, 2), (BF16, (2, 1), 16, 1), *([(BF16, (8, 2), 128, k) for k in (1, 2)] if ON_GPU else [])],
)


@pytest.fixture(autouse=True)
def allow_triton(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "triton":
        pytest.importorskip("triton")
        sort_small_blocks(monkeypatch)


def options(top_k: int, score: str) -> dict[str, object]:
    return {"chunk_size": SIZE, "top_k": top_k, "score": score}


def choice_of_the_op(q, k, v, top_k, score):
    """Return the selection of the reference by all keys in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    return top1_chunk_attention(q, k, v, return_selection=True, **options(top_k, score))[1]


@FORMS
@SHAPES
def test_selection_by_mean_keys(form, dtype, heads, d, top_k):
    q, k, v, _ = draw(SIZE * CHUNKS, heads=heads, d=d, dtype=dtype, batch=2, step=1.0)
    expected = choice_of_the_op(q, k, v, top_k, "approx")
    means = torch.cat([mean_keys(part, SIZE, implementation=form) for part in k.chunk(2, 1)], 1)
    for start in (0, 2 * SIZE):
        found = best_by_mean(q[:, start:], means, chunk_size=SIZE, top_k=top_k, query_offset=start, implementation=form)
        assert torch.equal(found, expected[:, start:])


@FORMS
@SHAPES
@pytest.mark.parametrize("score", ["exact", "exact_lse"])
def test_merge_of_shards_in_any_order(form, dtype, heads, d, top_k, score):
    q, k, v, _ = draw(SIZE * CHUNKS, heads=heads, d=d, dtype=dtype, batch=2, seed=1)
    expected = choice_of_the_op(q, k, v, top_k, score)
    start = 2 * SIZE
    own, one, two = (
        best_by_keys(
            q[:, start:], part, query_offset=start, first_chunk=first, implementation=form, **options(top_k, score)
        )
        for first, part in ((2, k[:, start:]), (0, k[:, :SIZE]), (1, k[:, SIZE:start]))
    )
    for a, b, c in itertools.permutations([own, one, two]):
        found = merge(merge(a, b), c)
        assert torch.equal(found.chunks, expected[:, start:])
        assert torch.equal(found.scores.isinf(), found.chunks < 0)


@FORMS
@SHAPES
def test_attention_to_a_given_selection(form, dtype, heads, d, top_k):
    *inputs, grad = draw(SIZE * CHUNKS - 27, heads=heads, d=d, dtype=dtype, seed=2)
    results = []
    inputs = [x.requires_grad_() for x in inputs]
    made = {"local": False, "implementation": form, **options(top_k, "exact")}
    out, chosen = top1_chunk_attention(*inputs, return_selection=True, **made)
    results.append((out, *torch.autograd.grad(out, inputs, grad)))
    given = made | {"score": "approx"}  # this score alone would choose other chunks
    out, same = top1_chunk_attention(*inputs, selection=chosen, return_selection=True, **given)
    results.append((out, *torch.autograd.grad(out, inputs, grad)))
    assert torch.equal(same, chosen)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(choice_of_the_op(*inputs, top_k, "approx"), chosen)


@pytest.mark.parametrize("form", ["reference"])
def test_ties_between_shards_go_to_the_lowest_chunk(form):
    """Chunks whose scores are all -inf tie, too: they still count as candidates."""

    def best(chunks: list[int], scores: list[float]) -> Best:
        return Best(torch.tensor(scores)[None, None, None], torch.tensor(chunks)[None, None, None])

    minus = -torch.inf
    a, b = best([5, 7, -1], [2.0, minus, minus]), best([3, 9, 6], [2.0, 2.0, minus])
    for found in (merge(a, b), merge(b, a)):
        assert found.chunks.flatten().tolist() == [3, 5, 9]
    a, b = best([7, -1], [minus, minus]), best([-1, -1], [minus, minus])
    assert merge(b, a).chunks.flatten().tolist() == [7, -1]


@pytest.mark.parametrize("form", ["reference"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"selection": torch.zeros(1, 8, 2, 2, dtype=torch.int64)},
            r"selection has shape \[1, 8, 2, 2\]: give \[1, 8, 2, 1\]",
        ),
        ({"selection": torch.zeros(1, 8, 2, 1)}, "selection has dtype torch.float32: give torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "selection is given with cu_seqlens: give one of them"),
    ],
)
def test_invalid_selection_raises(form, changed, message):
    q, k, v, _ = draw(8)
    good = {"selection": torch.full((1, 8, 2, 1), -1), "chunk_size": 4}
    with pytest.raises(ValueError, match=message):
        top1_chunk_attention(q, k, v, **(good | changed))
