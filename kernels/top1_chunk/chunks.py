"""Where each chunk's keys and queries lie, for a batch of sequences or for packed documents.

The kernels see one flat row of tokens: token of row b at position t is b * length + t. A *slot* is a chunk of any row
or document; slots are numbered through, so that those of a document are neighbours.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

KEY_START, KEY_COUNT, QUERY_START, QUERY_COUNT, QUERY_SHIFT, FIRST_SLOT = range(6)
"""Columns of the table: flat tokens and counts of keys and of queries that lie in the slot; the first such query's
position in the chunk; the document's first slot."""

NUM_COLUMNS = 6


class Layout(NamedTuple):
    """Shapes that a table is made for."""

    batch: int
    num_queries: int
    num_keys: int
    query_offset: int
    chunk_size: int


def chunk_table(layout: Layout, bounds: Sequence[int] | None, device: torch.device) -> Tensor:
    """Give the table, int32 [slots, NUM_COLUMNS]. All layers share one, forward and backward: do not write into it.

    Args:
        layout: the op's shapes.
        bounds: packed documents' bounds (batch 1), or None: each row of the batch is a document.
        device: where the table is wanted.
    """
    return _cached_table(layout, None if bounds is None else tuple(bounds), device)


# Few: packed documents have a table of their own in each micro-batch, which no later one asks for.
@lru_cache(maxsize=16)
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
    """The first slot of each query's row or document, int64 [b * tq]."""
    first, count = table[:, FIRST_SLOT].long(), table[:, QUERY_COUNT].long()
    return torch.repeat_interleave(first, count, output_size=layout.batch * layout.num_queries)


def table_of_some_keys(layout: Layout, num_held: int, device: torch.device) -> Tensor:
    """As `chunk_table` for rows of which only the first keys are held: their chunks alone may be chosen or read.

    Args:
        layout: of the rows, with all keys up to the last query.
        num_held: how many keys of each row lie in memory, whole chunks.
        device: where the table is wanted.
    """
    table = chunk_table(layout, None, device).clone()
    row = torch.arange(layout.batch, device=device).repeat_interleave(len(table) // layout.batch)
    table[:, KEY_START] -= (row * (layout.num_keys - num_held)).to(torch.int32)
    return table
