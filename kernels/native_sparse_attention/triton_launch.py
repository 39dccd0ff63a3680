"""Launch of the block selection kernel."""

import torch
from torch import Tensor

from kernels.common.triton_math import Tiles, next_power_of_two, on_device
from kernels.native_sparse_attention import triton_select

TILES = {torch.float32: Tiles(32, 32, 4, 1), torch.bfloat16: Tiles(64, 64, 4, 2), torch.float16: Tiles(64, 64, 4, 2)}
"""Tile rows are (query, head) pairs, columns mean keys. The sizes fit a Hopper GPU; others were not timed."""


def select_blocks(
    q: Tensor, mean_keys: Tensor, lse: Tensor, *, block_size: int, num_earlier: int, scale: float, query_offset: int
) -> Tensor:
    """Implement `op.choose_blocks` for contiguous tensors."""
    (batch, num_queries, num_heads, head_dim), (num_means, num_groups) = q.shape, mean_keys.shape[1:3]
    tile = TILES[q.dtype]
    heads = next_power_of_two(num_heads // num_groups)
    queries = max(tile.block_m // heads, 1)
    tiles = -(-num_queries // queries)
    chosen = torch.empty(batch, num_queries, num_groups, num_earlier, dtype=torch.int64, device=q.device)
    with on_device(q):
        triton_select.select_blocks[batch * tiles, num_groups](
            q, mean_keys, lse, chosen, num_queries, num_means, query_offset, tiles, scale,
            G=num_groups, R=num_heads // num_groups, HEAD_DIM=head_dim, BLOCK_D=max(16, next_power_of_two(head_dim)),
            QUERIES=queries, HEADS=heads, BLOCK_N=tile.block_n, SIZE=block_size, TOP_K=num_earlier,
            LIST_SIZE=next_power_of_two(num_earlier), **tile.launch(),
        )  # fmt: skip
    return chosen
