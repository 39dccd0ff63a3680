"""The choice of blocks as an operator of torch.library: torch.compile and fake tensors see one opaque op.

Importing this needs no Triton; calling does.
"""

import torch
from torch import Tensor


@torch.library.custom_op("selectron::native_sparse_attention_blocks", mutates_args=())
def choose_blocks(
    q: Tensor, mean_keys: Tensor, lse: Tensor, block_size: int, num_earlier: int, scale: float, query_offset: int
) -> Tensor:
    """Choose the blocks before the own one that each query attends to; see `select_blocks` of the reference.

    Args:
        q: queries [b, tq, hq, d].
        mean_keys: of all whole blocks, [b, blocks, hkv, d] in q's dtype.
        lse: fp32 [b, hq, tq], natural logsumexp of a query's scores with the mean keys that it sees.
        block_size: keys per block.
        num_earlier: how many blocks, at least 2: the first and the one before the own are among them.
        scale: factor on q.k.
        query_offset: global position of the first query.

    Returns:
        int64 [b, tq, hkv, num_earlier], block 0 first, -1 behind them where there are fewer.
    """
    from kernels.native_sparse_attention import triton_launch

    return triton_launch.select_blocks(
        q.contiguous(),
        mean_keys.contiguous(),
        lse.contiguous(),
        block_size=block_size,
        num_earlier=num_earlier,
        scale=scale,
        query_offset=query_offset,
    )


@choose_blocks.register_fake
def _(
    q: Tensor, mean_keys: Tensor, lse: Tensor, block_size: int, num_earlier: int, scale: float, query_offset: int
) -> Tensor:
    batch, num_queries, _, _ = q.shape
    return q.new_empty(batch, num_queries, mean_keys.shape[2], num_earlier, dtype=torch.int64)
