"""Packed documents: an op called once per document."""

import pytest
import torch

from kernels.common.documents import by_document, flat_tokens

BOUNDS = [0, 5, 5, 6, 21]


def own_document(q, k, v, *, query_offset, factor):
    """Return each query's position in its document, times a factor, and the document's number of keys."""
    assert k.shape[1] == v.shape[1]
    position = torch.arange(query_offset, query_offset + q.shape[1])[None]
    return position * factor, torch.full_like(position, k.shape[1])


@pytest.mark.parametrize(("num_queries", "offset"), [(21, 0), (3, 0), (4, 3), (1, 5), (6, 15)])
def test_queries_attend_within_their_document(num_queries, offset):
    q, k = torch.zeros(1, num_queries, 2, 4), torch.zeros(1, 21, 1, 4)
    out, choice = by_document(own_document, q, k, k, BOUNDS, query_offset=offset, factor=10)
    documents = [(start, end) for start, end in [(0, 5), (5, 6), (6, 21)] for _ in range(start, end)]
    expected = documents[offset : offset + num_queries]
    assert out[0].tolist() == [10 * (offset + i - start) for i, (start, _) in enumerate(expected)]
    assert choice[0].tolist() == [end - start for start, end in expected]


def test_op_receives_the_tokens_of_each_document():
    x = torch.arange(21.0).reshape(1, 21, 1, 1)

    def given(q, k, v, *, query_offset):
        return q, k + v

    out, choice = by_document(given, x, x, 10 * x, BOUNDS, query_offset=0)
    assert torch.equal(out, x)
    assert torch.equal(choice, 11 * x)


def test_flat_tokens_are_ordered_by_row():
    x = torch.arange(24).reshape(3, 2, 2, 2).transpose(0, 1)
    flat = flat_tokens(x)
    assert flat.is_contiguous()
    assert flat.tolist() == [*x[0].tolist(), *x[1].tolist()]
