"""Native Sparse Attention on a GPU: three branches that never materialise their scores, and their gated sum."""

import torch
from torch import Tensor

from kernels.common.fusion import fused
from kernels.native_sparse_attention.compressed import attend_compressed, rounded_block_means
from kernels.native_sparse_attention.op import choose_blocks
from kernels.native_sparse_attention.selected import attend_selected
from kernels.softmax_attention import softmax_attention

NUM_ALWAYS_SELECTED = 3
"""Number of blocks that are always selected: a query's own block, the block before it, and block 0."""


def native_sparse_attention_triton(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshd: Tensor,
    gates_bthx: Tensor,
    *,
    block_size: int,
    num_selected: int,
    window: int,
    scale: float,
    query_offset: int,
) -> Tensor:
    """Compute the op in memory linear in the sequence length. Arguments as in `native_sparse_attention`, checked there.

    Block means and the branches' outputs are rounded to the inputs' dtype.
    """
    k_bnhd, v_bnhd = (rounded_block_means(x, block_size) for x in (k_bshd, v_bshd))
    compressed, lse_bht = attend_compressed(
        q_bthd, k_bnhd, v_bnhd, block_size=block_size, scale=scale, query_offset=query_offset
    )
    with torch.no_grad():
        num_earlier = max(num_selected, NUM_ALWAYS_SELECTED) - 1
        earlier_btgm = choose_blocks(q_bthd, k_bnhd, lse_bht, block_size, num_earlier, scale, query_offset)
    selected = attend_selected(
        q_bthd, k_bshd, v_bshd, earlier_btgm, block_size=block_size, scale=scale, query_offset=query_offset
    )
    windowed = softmax_attention(q_bthd, k_bshd, v_bshd, window=window, scale=scale, query_offset=query_offset)
    return gated_sum(compressed, selected, windowed, gates_bthx)


@fused
def gated_sum(compressed_bthd: Tensor, selected_bthd: Tensor, windowed_bthd: Tensor, gates_bthx: Tensor) -> Tensor:
    """Return the sum of the branches [b, t, h, d] times their gates [b, t, h, 3], in fp32, in the branches' dtype."""
    branches = (compressed_bthd, selected_bthd, windowed_bthd)
    gates = gates_bthx.float().unbind(-1)
    compressed, selected, windowed = (g[..., None] * x.float() for g, x in zip(gates, branches, strict=True))
    return (compressed + selected + windowed).to(windowed_bthd.dtype)
