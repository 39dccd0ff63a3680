"""Chunk table: built once for all layers, and again for other documents.

The tests of the kernels that read the table check its contents.
"""

import torch

from kernels.top1_chunk.chunks import Layout, chunk_table

CPU = torch.device("cpu")


def test_layers_share_a_table():
    layout = Layout(batch=1, num_queries=40, num_keys=40, query_offset=0, chunk_size=8)
    for bounds in (None, [0, 5, 40]):
        table = chunk_table(layout, bounds, CPU)
        again = None if bounds is None else list(bounds)
        assert chunk_table(layout, again, CPU) is table
        assert chunk_table(layout._replace(chunk_size=16), bounds, CPU).shape[0] < table.shape[0]
    assert not torch.equal(chunk_table(layout, [0, 5, 40], CPU), chunk_table(layout, [0, 6, 40], CPU))
