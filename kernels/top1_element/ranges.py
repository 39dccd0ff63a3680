"""Ranges of the keys that each query sees, and of the queries that see each key.

Kernels take flat tokens: position t of batch row b is token b * length + t. The ends of a range do not decrease from
token to token, so the ranges of a block's first and last token bound the ranges of all its tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.tensor_cache import cached_tensors


class Shape(NamedTuple):
    """Shapes that determine the ranges."""

    batch: int
    num_queries: int
    num_keys: int
    query_offset: int


class Ranges(NamedTuple):
    """Flat token ranges, int32."""

    first_key: Tensor
    """[b * tq], per query: the start of its row or document."""
    own_key: Tensor
    """[b * tq], per query: the last key it sees."""
    first_query: Tensor
    """[b * tk], per key: the first query that sees it."""
    end_query: Tensor
    """[b * tk], per key: one past the last query that sees it."""


@cached_tensors(16)
def visible_ranges(shape: Shape, bounds: tuple[int, ...] | None, device: torch.device) -> Ranges:
    """Build the ranges; the result is cached.

    Args:
        shape: shapes of the op.
        bounds: bounds of packed documents (batch 1), or None: each row of the batch is a document.
        device: device of the ranges.
    """
    batch, num_queries, num_keys, offset = shape
    bound_d = torch.tensor(bounds or (0, num_keys))
    key_s = torch.arange(num_keys)
    document_s = torch.searchsorted(bound_d, key_s, right=True) - 1
    own_key_t = torch.arange(offset, offset + num_queries)
    first_key_t = bound_d[document_s][own_key_t]
    # The clamps make the range empty for keys whose document contains no query.
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
