"""Table of the keys and queries of each chunk, for a batch of sequences or for packed documents.

Kernels take flat tokens: position t of batch row b is token b * length + t. A *slot* is the index of a chunk among the
chunks of all batch rows or documents. The chunks of a document have adjacent slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.tensor_cache import cached_tensors

KEY_START, KEY_COUNT, QUERY_START, QUERY_COUNT, QUERY_SHIFT, FIRST_SLOT = range(6)
"""Table columns: flat start and number of the chunk's keys, flat start and number of its queries, position of the first
query within the chunk, and first slot of the document."""

NUM_COLUMNS = 6


class Layout(NamedTuple):
    """Shapes that determine a chunk table."""

    batch: int
    num_queries: int
    num_keys: int
    query_offset: int
    chunk_size: int


def chunk_table(layout: Layout, bounds: Sequence[int] | None, device: torch.device) -> Tensor:
    """Return the chunk table, int32 [slots, NUM_COLUMNS]. It is cached and shared by all layers: do not modify it.

    Args:
        layout: shapes of the op.
        bounds: bounds of packed documents (batch 1), or None: each row of the batch is a document.
        device: device of the table.
    """
    return _cached_table(layout, None if bounds is None else tuple(bounds), device)


# The cache is small, because each micro-batch of packed documents has a new table that is not used again.
@cached_tensors(16)
def _cached_table(layout: Layout, bounds: tuple[int, ...] | None, device: torch.device) -> Tensor:
    table = _table_of_rows(layout) if bounds is None else _table_of_documents(layout, bounds)
    return table.to(device)


def _table_of_rows(layout: Layout) -> Tensor:
    row = _table_of_documents(layout, (0, layout.num_keys))
    step = torch.zeros(NUM_COLUMNS, dtype=torch.int32)
    step[KEY_START], step[QUERY_START], step[FIRST_SLOT] = layout.num_keys, layout.num_queries, len(row)
    return (row + torch.arange(layout.batch, dtype=torch.int32)[:, None, None] * step).flatten(0, 1)


def _table_of_documents(layout: Layout, bounds: tuple[int, ...]) -> Tensor:
    size = layout.chunk_size
    bound_d = torch.tensor(bounds)
    chunks_d = (bound_d.diff() + size - 1) // size
    first_slot_d = chunks_d.cumsum(0) - chunks_d
    document_n = torch.repeat_interleave(torch.arange(len(chunks_d)), chunks_d)
    first_slot_n = first_slot_d[document_n]
    key_start_n = bound_d[document_n] + (torch.arange(len(document_n)) - first_slot_n) * size
    key_end_n = torch.minimum(key_start_n + size, bound_d[document_n + 1])
    # Queries are the tokens query_offset .. query_offset + num_queries - 1.
    query_start_n = key_start_n.clamp(min=layout.query_offset)
    query_end_n = key_end_n.clamp(max=layout.query_offset + layout.num_queries)
    columns = {
        KEY_START: key_start_n,
        KEY_COUNT: key_end_n - key_start_n,
        QUERY_START: query_start_n - layout.query_offset,
        QUERY_COUNT: (query_end_n - query_start_n).clamp(min=0),
        QUERY_SHIFT: query_start_n - key_start_n,
        FIRST_SLOT: first_slot_n,
    }
    return torch.stack([columns[i] for i in range(NUM_COLUMNS)], dim=1).to(torch.int32)


def first_slots(table: Tensor, layout: Layout) -> Tensor:
    """Return the first slot of each query's row or document, int64 [b * tq]."""
    first, count = table[:, FIRST_SLOT].long(), table[:, QUERY_COUNT].long()
    return torch.repeat_interleave(first, count, output_size=layout.batch * layout.num_queries)


def local_chunk_table(layout: Layout, num_local_keys: int, device: torch.device) -> Tensor:
    """Return the chunk table for rows of which only the first keys are in memory.

    Only chunks of these keys may be selected or read.

    Args:
        layout: layout of the rows with all keys up to the last query.
        num_local_keys: number of keys of each row in memory, complete chunks.
        device: device of the table.
    """
    table = chunk_table(layout, None, device).clone()
    row = torch.arange(layout.batch, device=device).repeat_interleave(len(table) // layout.batch)
    table[:, KEY_START] -= (row * (layout.num_keys - num_local_keys)).to(torch.int32)
    return table
