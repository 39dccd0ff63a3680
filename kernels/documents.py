"""Documents packed into one sequence: the check of their bounds, an op document by document, and flat tokens.

`cu_seqlens` is the field's form: int tensor [documents + 1], 0 first, the sequence's length last, never falling;
document i is the tokens cu_seqlens[i] .. cu_seqlens[i+1] - 1.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


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


def by_document(
    op: Callable[..., tuple[Tensor, Tensor]],
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshe: Tensor,
    bounds: Sequence[int],
    *,
    query_offset: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call an op for each document by itself, and join the results along the sequence.

    Args:
        op: takes q, k, v, query_offset and the options; gives the output and the choice, both [b, tq, ...].
        q_bthd: queries [1, tq, hq, d] of the packed sequence.
        k_bshd: keys [1, tk, hkv, d].
        v_bshe: values [1, tk, hkv, dv].
        bounds: as from `document_bounds`.
        query_offset: position of the first query in the packed sequence; the op is given that in the document.
        options: further arguments of the op.

    Returns:
        The op's output and choice for all queries, [1, tq, ...] in its dtypes; what counts positions in the choice
        counts from the document's start.
    """
    parts = []
    for start, end in pairwise(bounds):
        first, last = max(start, query_offset), min(end, query_offset + q_bthd.shape[1])
        if first < last:  # not every document holds a query
            q_of_document = q_bthd[:, first - query_offset : last - query_offset]
            keys = slice(start, end)
            parts.append(op(q_of_document, k_bshd[:, keys], v_bshe[:, keys], query_offset=first - start, **options))
    outs, choices = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(choices, dim=1)


def flat_tokens(x_bthd: Tensor) -> Tensor:
    """Give all rows' tokens as the one row that the Triton kernels see: [b * t, heads, d], contiguous."""
    return x_bthd.flatten(0, 1).contiguous()
