"""Documents packed into one sequence: the check of their bounds, and the same op document by document.

`cu_seqlens` is the field's form: int tensor [documents + 1], 0 first, the sequence's length last, never falling;
document i is the tokens cu_seqlens[i] .. cu_seqlens[i+1] - 1.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """A document's keys, and the queries that lie in it, as token ranges of a packed sequence."""

    key_start: int
    key_end: int
    query_start: int
    query_end: int
    query_offset: int
    """Position in the document of its first query."""


def document_bounds(cu_seqlens: Tensor, batch: int, num_keys: int) -> list[int]:
    """Read and check the bounds. A tensor on a GPU is waited for; one on the CPU is not.

    Args:
        cu_seqlens: as above, any integer dtype and device.
        batch: rows of the batch; packed documents lie in a single one.
        num_keys: length of the packed sequence.

    Raises:
        ValueError: it does not fit; the message says how.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}: "
            "give whole numbers [documents + 1]"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens is given with a batch of {batch}: pack the documents into one row")
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_keys:
        raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}: begin at 0 and end at the {num_keys} keys")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise ValueError(f"cu_seqlens[{i + 1}] is {end}, below cu_seqlens[{i}] = {start}: sort the bounds")
    return bounds


def spans(bounds: list[int], query_offset: int, num_queries: int) -> Iterator[Span]:
    """The documents that queries query_offset .. query_offset + num_queries - 1 of the packed sequence lie in."""
    for start, end in pairwise(bounds):
        first, last = max(start, query_offset), min(end, query_offset + num_queries)
        if first < last:
            yield Span(start, end, first - query_offset, last - query_offset, first - start)


def concatenate(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join the documents' (output, choice) along the sequence."""
    outs, choices = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(choices, dim=1)
