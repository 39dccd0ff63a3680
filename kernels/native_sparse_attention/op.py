"""Block selection as an operator of torch.library, which is opaque to torch.compile and fake tensors.

Triton is imported only when the operator is called.
"""

import torch
from torch import Tensor


@torch.library.custom_op("selectron::native_sparse_attention_blocks", mutates_args=())
def choose_blocks(
    q: Tensor, mean_keys: Tensor, lse: Tensor, block_size: int, num_earlier: int, scale: float, query_offset: int
) -> Tensor:
    """Select the blocks before its own that each query attends to, like `reference.select_blocks`.

    Args:
        q: queries [b, tq, hq, d].
        mean_keys: mean keys of all complete blocks, [b, blocks, hkv, d] in q's dtype.
        lse: fp32 [b, hq, tq], natural log-sum-exp of a query's scores with the mean keys that it sees.
        block_size: keys per block.
        num_earlier: number of blocks, at least 2, including the first and the one before the query's own.
        scale: factor on q.k.
        query_offset: global position of the first query.

    Returns:
        int64 [b, tq, hkv, num_earlier], block 0 first, padded with -1 at the end.
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
