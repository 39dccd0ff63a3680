"""Block selection per query and group of heads, in Triton. No [queries, blocks] array is written to memory."""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_lists import insert_tile, store_list
from kernels.common.triton_math import LOG2E, load_rows, product


@triton.jit
def select_blocks(
    q, means, lse, chosen, num_queries, num_means, query_offset, tiles, scale,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, LIST_SIZE: tl.constexpr,
):  # fmt: skip
    """Select earlier blocks: the first, the one before the query's own, and the most important. Grid (b * tiles, G).

    A program processes the heads of one group for a tile of queries: row i * HEADS + r is head r of query i.

    Args:
        q: queries [b, num_queries, G * R, d].
        means: mean keys [b, num_means, G, d].
        lse: fp32 [b, G * R, num_queries], natural log-sum-exp of the scores with the mean keys.
        chosen: int64 [b, num_queries, G, TOP_K], written: earlier blocks, padded with -1 at the end.
        tiles: tiles of queries per batch row.
        HEADS: R rounded up to a power of two.
    """
    b, g = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    # The last queries have the most blocks to scan, so they start first.
    begin = (tiles - 1 - tl.program_id(0) % tiles) * QUERIES
    m = tl.arange(0, QUERIES * HEADS)
    t_m, r = begin + m // HEADS, m % HEADS
    valid_m = (t_m < num_queries) & (r < R)
    row = (b * num_queries + t_m) * (G * R) + g * R + r
    queries = load_rows(q, row, valid_m, HEAD_DIM, HEAD_DIM, BLOCK_D)
    level = tl.load(lse + (b * (G * R) + g * R + r) * num_queries + t_m, mask=valid_m, other=0.0)
    t = begin + tl.arange(0, QUERIES)
    own = tl.where(t < num_queries, (query_offset + t) // SIZE, 0)[:, None]
    values = tl.full([QUERIES, LIST_SIZE], -float("inf"), tl.float32)
    blocks = tl.full([QUERIES, LIST_SIZE], -1, tl.int32)
    end = tl.max(own)
    for first in range(0, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        keys = load_rows(means + g * HEAD_DIM, b * num_means + n, n < end, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        importance = tl.exp2((product(queries, keys.T) * scale - level[:, None]) * LOG2E)
        if HEADS > 1:
            importance = tl.where(valid_m[:, None], importance, 0.0)
            importance = tl.sum(tl.reshape(importance, [QUERIES, HEADS, BLOCK_N]), 1)
        block = n[None, :]
        importance = tl.where((block == 0) | (block == own - 1), float("inf"), importance)
        values, blocks = insert_tile(values, blocks, tl.where(block < own, importance, -float("inf")), first)
    offset = ((b * num_queries + t) * G + g) * TOP_K
    store_list(chosen, chosen, values, blocks, offset, t < num_queries, 1, TOP_K, False)
