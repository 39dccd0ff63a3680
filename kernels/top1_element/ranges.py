"""Which keys a query sees and which queries see a key, as ranges of tokens.

The kernels see one flat row of tokens: the token of row b at position t is b * length + t. All ranges rise with the
token, so that a block's first and last token bound what the whole block sees.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """Shapes that ranges are made for."""

    batch: int
    num_queries: int
    num_keys: int
    query_offset: int


class Ranges(NamedTuple):
    """Flat tokens, int32."""

    first_key: Tensor
    """Of each query, [b * tq]: the start of its row or document."""
    own_key: Tensor
    """Of each query, [b * tq]: the last key it sees."""
    first_query: Tensor
    """Of each key, [b * tk]: the first query that sees it."""
    end_query: Tensor
    """Of each key, [b * tk]: one past the last query that sees it."""


@lru_cache(maxsize=16)
def visible_ranges(shape: Shape, bounds: tuple[int, ...] | None, device: torch.device) -> Ranges:
    """Build the ranges.

    Args:
        shape: the op's shapes.
        bounds: packed documents' bounds (batch 1), or None: each row of the batch is a document.
        device: where the ranges are wanted.
    """
    batch, num_queries, num_keys, offset = shape
    bound_d = torch.tensor(bounds or (0, num_keys))
    key_s = torch.arange(num_keys)
    document_s = torch.searchsorted(bound_d, key_s, right=True) - 1
    own_key_t = torch.arange(offset, offset + num_queries)
    first_key_t = bound_d[document_s][own_key_t]
    # Not every key's document reaches into the queries.
    first_query_s = (key_s - offset).clamp(0, num_queries)
    end_query_s = (bound_d[document_s + 1] - offset).clamp(0, num_queries)
    row_b1 = torch.arange(batch)[:, None]

    def flat(position_n: Tensor, length: int) -> Tensor:
        return (row_b1 * length + position_n).flatten().to(torch.int32).to(device)

    return Ranges(
        flat(first_key_t, num_keys),
        flat(own_key_t, num_keys),
        flat(first_query_s, num_queries),
        flat(end_query_s, num_queries),
    )
