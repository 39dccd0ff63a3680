"""Documents packed into one sequence: check their bounds, run an op per document, flatten batches.

`cu_seqlens` has the usual form: an int tensor [documents + 1] that starts with 0, never decreases and ends with the
length of the sequence. Document i is the tokens cu_seqlens[i] .. cu_seqlens[i+1] - 1.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def document_bounds(cu_seqlens: Tensor, batch: int, num_keys: int) -> list[int]:
    """Check `cu_seqlens` and return it as a list. A tensor on a GPU forces a device synchronisation.

    Args:
        cu_seqlens: bounds [documents + 1], any integer dtype and device.
        batch: batch size; packed documents require 1.
        num_keys: length of the packed sequence.

    Raises:
        ValueError: the bounds do not fit the sequence; the message gives the reason.
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
    """Run an attention op on each document separately and concatenate the results along the sequence.

    Args:
        op: takes q, k, v, query_offset and the options; returns the output and the selection, both [b, tq, ...].
        q_bthd: queries [1, tq, hq, d] of the packed sequence.
        k_bshd: keys [1, tk, hkv, d].
        v_bshe: values [1, tk, hkv, dv].
        bounds: document bounds from `document_bounds`.
        query_offset: position of the first query in the packed sequence. `op` receives the offset in its document.
        options: further arguments of the op.

    Returns:
        Output and selection for all queries, [1, tq, ...], in the op's dtypes. Positions in the selection are relative
        to the start of the document.
    """
    parts = []
    for start, end in pairwise(bounds):
        first, last = max(start, query_offset), min(end, query_offset + q_bthd.shape[1])
        if first < last:  # the document contains queries
            q_of_document = q_bthd[:, first - query_offset : last - query_offset]
            keys = slice(start, end)
            parts.append(op(q_of_document, k_bshd[:, keys], v_bshe[:, keys], query_offset=first - start, **options))
    outs, choices = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(choices, dim=1)


def flat_tokens(x_bthd: Tensor) -> Tensor:
    """Flatten batch and sequence to the contiguous [b * t, heads, d] that the Triton kernels take."""
    return x_bthd.flatten(0, 1).contiguous()
