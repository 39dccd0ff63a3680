"""Attention to the mean keys and values of complete blocks, with torch's FlexAttention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kernels.common.fusion import compiled, fused
from kernels.common.tensor_cache import cached_tensors
from kernels.native_sparse_attention.reference import block_means
from kernels.softmax_attention.flex import BLOCK, mask_of_blocks, tile_bounds


class Compressed(NamedTuple):
    """Output of the compressed branch, and the statistics that block selection needs.

    Attributes:
        out_bthd: [b, tq, hq, d]; 0 for a query without a visible block.
        lse_bht: fp32 [b, hq, tq], natural log-sum-exp of the branch's scores; -inf for a query without a visible block.
    """

    out_bthd: Tensor
    lse_bht: Tensor


@fused
def rounded_block_means(x_bshd: Tensor, block_size: int) -> Tensor:
    """Return `block_means` accumulated in fp32 and rounded to x's dtype."""
    return block_means(x_bshd, block_size).to(x_bshd.dtype)


def attend_compressed(
    q_bthd: Tensor, k_bnhd: Tensor, v_bnhd: Tensor, *, block_size: int, scale: float, query_offset: int
) -> Compressed:
    """Attend to the means of the complete blocks that end at or before the query.

    A new length or offset triggers recompilation. On a CPU, FlexAttention runs in eager mode, materialises all scores
    and has no gradient.

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bnhd: mean keys [b, tk // block_size, hkv, d] in q's dtype.
        v_bnhd: mean values [b, tk // block_size, hkv, d] in q's dtype.
        block_size: keys per block.
        scale: factor on q.k.
        query_offset: global position of the first query.
    """
    batch, num_queries, num_heads, _ = q_bthd.shape
    num_blocks = k_bnhd.shape[1]
    if num_blocks == 0:  # FlexAttention does not accept empty keys
        lse = q_bthd.new_full((batch, num_heads, num_queries), -torch.inf, dtype=torch.float32)
        return Compressed(torch.zeros_like(q_bthd), lse)
    attend = compiled(_attend, q_bthd, later_dynamic=None, fullgraph=True)
    mask = ended_blocks(num_queries, num_blocks, block_size, query_offset, q_bthd.device)
    out_bhtd, aux = attend(*(x.transpose(1, 2) for x in (q_bthd, k_bnhd, v_bnhd)), mask=mask, scale=scale)
    return Compressed(out_bhtd.transpose(1, 2), aux.lse)


# A separate function, because torch limits recompilations per function. Otherwise the recompilations for sliding
# windows would count towards the same limit.
def _attend(q_bhtd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor, *, mask: BlockMask, scale: float) -> Any:
    # There are few keys. With shared key heads, few programs would compute the keys' gradients, each over all heads.
    k_bhnd, v_bhnd = (x.repeat_interleave(q_bhtd.shape[1] // x.shape[1], 1) for x in (k_bhnd, v_bhnd))
    return flex_attention(q_bhtd, k_bhnd, v_bhnd, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True))


@cached_tensors(16)
def ended_blocks(
    num_queries: int, num_blocks: int, block_size: int, query_offset: int, device: torch.device
) -> BlockMask:
    """Return FlexAttention's mask of the complete blocks that end at or before a query; each block is one key.

    Args:
        num_queries: tq.
        num_blocks: number of complete blocks of keys.
        block_size: keys per block.
        query_offset: global position of the first query.
        device: device of the mask.
    """

    def ended(b: Tensor, h: Tensor, t: Tensor, n: Tensor) -> Tensor:
        return (n + 1) * block_size <= t + query_offset + 1

    first_block, first_query, end_query = tile_bounds(num_queries, num_blocks, query_offset, device)
    # Number of ended blocks for a tile's first and for its last query.
    min_ended = (first_query + 1) // block_size
    max_ended = end_query // block_size
    is_full = (first_block + BLOCK <= min_ended) & (first_query + BLOCK == end_query)
    return mask_of_blocks(first_block < max_ended, is_full, ended, num_queries, num_blocks)
